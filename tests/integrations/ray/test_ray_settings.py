"""Settings of a deployment on Ray, the message where Ray is not installed, and the files in ``deploy/``.

These are valid, as far as the packages that check them are installed, and agree with the code.
"""

import ast
import pickle
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.main import get_command
from typer.testing import CliRunner

import cocoa_integrations.ray
from cocoa_engine.cli import options as plugins
from cocoa_engine.cli.app import OneLineErrors
from cocoa_engine.cli.score import score
from cocoa_engine.errors import ConfigError, MissingExtraError
from cocoa_engine.model.load_options import LoadOptions
from cocoa_integrations.evaluation.command import evaluate
from cocoa_integrations.ray import jobs
from cocoa_integrations.ray.jobs import Pool, connected, drain, everywhere
from cocoa_integrations.ray.settings import RaySettings
from cocoa_integrations.server.command import serve
from cocoa_integrations.server.routes.info import LIVE, METRICS, READY
from tests.helpers.pages import ROOT
from tests.helpers.processes import run


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2, "max_replicas": 3}, "either replicas, or min_replicas and max_replicas"),
        ({"min_replicas": 2}, "max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"loading": {"model_name": "elsewhere"}}, "model: name the model with"),
        ({"loading": {"model_kwargs": {"tp_plan": "auto"}}}, "tensor parallelism needs processes"),
        ({"num_gpus": 1.5}, "num_gpus: a replica has a part of one GPU, or whole ones"),
        ({"num_gpus": 2, "placement_group_bundles": [{"CPU": 1}]}, "the first bundle must hold"),
        ({"placement_group_bundles": []}, "the first bundle must hold"),
        ({"placement_group_strategy": "NEAR"}, "placement_group_strategy"),
        ({"server": {"host": "0.0.0.0"}}, "give a key"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySettings(**given)


def test_words_of_a_command_line_are_numbers() -> None:
    """As ``serve run cocoa_integrations.ray:app replicas=2`` gives them."""
    settings = RaySettings.model_validate({"replicas": "2", "num_gpus": "0.5", "max_batch_size": "4"})
    assert (settings.replicas, settings.num_gpus, settings.slots) == (2, 0.5, 8)


def test_a_replica_queues_no_more_than_it_decodes_so_that_others_get_the_rest() -> None:
    assert RaySettings().slots == 16
    assert RaySettings(max_queue=0).slots == 8
    assert RaySettings(loading={"runtime": {"max_batch_size": 3, "max_queue": 5}}).slots == 8
    assert RaySettings(max_batch_size=2, max_replicas=3).waiting == 12
    assert RaySettings(max_waiting=5).waiting == 5


@pytest.mark.parametrize("name", ["app", "RaySettings"])
def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"needs ray: pip install 'cocoa-integrations\[ray\]'"):
        getattr(cocoa_integrations.ray, name)
    with pytest.raises(AttributeError, match="apps"):
        _ = cocoa_integrations.ray.apps


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("score --prompt One --text two --actors 2", "--actors needs --ray"),
        ("eval nq --data nowhere.jsonl --num-cpus 0.5", "--num-cpus needs --ray"),
        ("serve --replicas 2", "--replicas needs --ray"),
        ("serve --max-replicas 2", "--max-replicas needs --ray"),
        ("score --ray --prompt One --text two", "sharing the work is for many rows"),
    ],
)
def test_options_of_ray_need_ray_and_rows_a_file(command: str, message: str) -> None:
    app = typer.Typer(cls=OneLineErrors)  # whatever is installed
    for function in (score, evaluate, serve):
        app.command("eval" if function is evaluate else None)(function)
    result = CliRunner().invoke(app, command.split(), prog_name="cocoa", env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("command", ["score", "evaluate", "serve"])
def test_a_command_without_ray_names_the_extra(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options and the runners can be imported without Ray."""
    monkeypatch.setitem(sys.modules, "ray", None)
    options = plugins.runner_options(command)
    assert options is not None
    assert options() is None
    assert callable(options(ray=True))
    with (
        pytest.raises(MissingExtraError, match=rf"cocoa {command} --ray needs ray"),
        connected(f"cocoa {command} --ray"),
    ):
        pass


def test_the_log_of_gateways_that_do_not_answer_is_short(caplog: pytest.LogCaptureFixture) -> None:
    class Gateways:
        def broadcast(self, method: str) -> Any:
            raise RuntimeError("\x1b[31m" + f"{method} failed " * 10_000)

    drain(Gateways(), timeout=0)  # type: ignore[arg-type]
    messages = [record.message for record in caplog.records]
    assert len(messages) == 2
    for message, method in zip(messages, ("drain", "end"), strict=True):
        assert f"{method} failed" in message
        assert "\x1b" not in message
        assert len(message) < 1000


def test_an_actor_has_the_threads_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(jobs, "engine_of", lambda load, **options: given.update(options))
    jobs._Actor(Pool.of(LoadOptions(), actors=None, num_cpus=2.0, num_gpus=None, threads=3), pickle.dumps(len))
    assert given == {"threads": 3, "num_cpus": 2.0, "num_gpus": 0.0}


def test_paths_are_absolute_where_they_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    there = everywhere(LoadOptions(model_name="model", tokenizer_name="owner/name", calibrator="embedded"))
    assert there.model_name == str(tmp_path / "model")
    assert (there.tokenizer_name, there.calibrator) == ("owner/name", "embedded")


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
