"""The files in ``deploy/`` are valid, as far as the packages that check them are installed, and agree with the code."""

import ast
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from cocoa_integrations.ray.settings import RaySettings
from cocoa_integrations.server.routes.info import LIVE, METRICS, READY
from tests.helpers.pages import ROOT
from tests.helpers.processes import run

DEPLOY = ROOT / "deploy"
OF_KSERVE = {"minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "timeout"}
"""Fields of a predictor of KServe 0.21 that a pod has not."""


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def containers() -> list[dict[str, Any]]:
    (inference,) = read("kserve.yaml")
    return [
        *read("kubernetes.yaml")[0]["spec"]["template"]["spec"]["containers"],
        *inference["spec"]["predictor"]["containers"],
    ]


def test_compiled_kernels_can_be_loaded_from_the_cache() -> None:
    """Docker forbids execution in other temporary file systems."""
    cache, options = next(
        each.split(":") for each in read("compose.yaml")[0]["services"]["server"]["tmpfs"] if ".cache" in each
    )
    assert cache == "/home/cocoa/.cache"
    assert {"exec", "uid=1000"} <= set(options.split(","))


def test_options_of_the_server_exist() -> None:
    import typer

    from cocoa_integrations.server.command import serve

    app = typer.Typer()
    app.command()(serve)
    names = {name for option in get_command(app).params for name in option.opts}
    docker = re.search(r"^CMD \[(.*)\]$", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert docker
    composed = read("compose.yaml")[0]["services"]["server"]["command"]
    commands = [re.findall(r'"([^"]*)"', docker[1]), composed, *(container["args"] for container in containers())]
    assert len(commands) == 4
    for command, *options in commands:
        assert command == "serve"
        assert {option for option in options if option.startswith("--")} <= names


def test_probes_and_metrics_are_routes_of_the_server() -> None:
    probes = [one[name]["httpGet"]["path"] for one in containers() for name in one if name.endswith("Probe")]
    assert len(probes) == 4
    assert set(probes) <= {*READY, LIVE}
    (scrape,) = read("prometheus.yml")[0]["scrape_configs"]
    assert scrape["metrics_path"] == METRICS
    asked = re.search(r"urlopen\('http://127.0.0.1:8000(/[a-z]+)'", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    assert asked
    assert asked[1] in READY


def test_settings_of_the_ray_application_are_settings() -> None:
    (config,) = read("ray-serve.yaml")
    (application,) = config["applications"]
    assert (application["name"], application["import_path"]) == ("cocoa", "cocoa_integrations.ray:app")
    settings = RaySettings.model_validate(application["args"])
    assert (settings.num_gpus, settings.max_replicas) == (1, 4)


def test_ray_accepts_its_configuration() -> None:
    schema = pytest.importorskip("ray.serve.schema").ServeDeploySchema
    assert schema.model_validate(read("ray-serve.yaml")[0]).applications


def test_kubernetes_accepts_its_objects_and_the_predictor_of_kserve() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    objects = read("kubernetes.yaml")
    assert [described["kind"] for described in objects] == ["Deployment", "Service"]
    (service,) = read("kserve.yaml")
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    pod = {name: value for name, value in service["spec"]["predictor"].items() if name not in OF_KSERVE}
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "cocoa"}, "spec": pod}
    for described in (*objects, whole):
        validator.validate(described, validator.latest_version(), strict=True)


def fields_of_kserve(model: str) -> dict[str, str]:
    """The fields of one of KServe's objects and their types, as its package has them. The package is not imported."""
    try:
        (file,) = [one for one in files("kserve") or () if one.name == f"v1beta1_{model}.py"]
    except PackageNotFoundError:
        pytest.skip("kserve is not installed")
    (described,) = [one for one in ast.parse(file.read_text()).body if isinstance(one, ast.ClassDef)]
    tables = {
        target.id: ast.literal_eval(one.value)
        for one in described.body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    return {tables["attribute_map"][name]: kind for name, kind in tables["openapi_types"].items()}


def test_kserve_has_its_own_fields_with_these_types() -> None:
    (service,) = read("kserve.yaml")
    assert set(service) - {"apiVersion", "kind", "metadata"} == {"spec"}
    assert service["spec"].keys() <= fields_of_kserve("inference_service_spec").keys()
    known, predictor = fields_of_kserve("predictor_spec"), service["spec"]["predictor"]
    assert predictor.keys() <= known.keys()
    assert predictor.keys() >= OF_KSERVE
    types = {"int": int, "str": str}
    assert all(type(predictor[name]) is types[known[name]] for name in OF_KSERVE)


def test_compose_accepts_its_services() -> None:
    compose = pytest.importorskip("compose_spec")
    parsed = compose.PyCompose.from_yaml((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    parsed.validate()
    assert sorted(parsed.service_names()) == ["prometheus", "server"]


def test_hadolint_has_nothing_to_say_about_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = run([hadolint, str(DEPLOY / "Dockerfile")])
    assert (done.returncode, done.stdout) == (0, "")
