"""What Ray Serve is told about gateways and replicas."""

import inspect

import pytest

pytest.importorskip("ray")

from ray.serve import Application

from cocoa_integrations.ray import RaySettings, app
from cocoa_integrations.ray.application import ROUTER, engine_options, gateway_options

pytestmark = pytest.mark.slow

ONE_ARENA = {"env_vars": {"MALLOC_ARENA_MAX": "1"}}


def test_a_replica_takes_what_its_engine_decodes_and_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    options = engine_options(RaySettings(replicas=3, max_batch_size=4, max_queue=2))
    assert (options["num_replicas"], options["max_ongoing_requests"], options["max_queued_requests"]) == (3, 6, 18)
    assert options["request_router_config"].request_router_class == ROUTER
    assert options["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 0.0, "runtime_env": ONE_ARENA}
    assert "autoscaling_config" not in options
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")  # an allocator that the user has set stays
    for made in (engine_options, gateway_options):
        assert "runtime_env" not in made(RaySettings())["ray_actor_options"]


def test_numbers_of_replicas_gpus_and_bundles_are_handed_on() -> None:
    actor = {"num_gpus": 4, "num_cpus": 2, "accelerator_type": "H100", "resources": {"large": 1}}
    numbers = {"min_replicas": 2, "max_replicas": 5, "max_batch_size": 4}
    options = engine_options(RaySettings(**actor, **numbers, placement_group_bundles=[{"CPU": 2, "GPU": 4}]))
    scaling = options["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 5, 4)
    assert "num_replicas" not in options
    assert options["ray_actor_options"] == {**actor, "runtime_env": ONE_ARENA}
    assert options["placement_group_bundles"] == [{"CPU": 2, "GPU": 4}]
    assert options["placement_group_strategy"] == "STRICT_PACK"


def test_an_application_whose_gateways_outlive_replicas_to_end_their_streams() -> None:
    settings = RaySettings(gateways=2, server={"shutdown_timeout": 20})
    engine, gateway = engine_options(settings), gateway_options(settings)
    assert (gateway["num_replicas"], gateway["ray_actor_options"]) == (2, {"num_cpus": 0})
    assert gateway["graceful_shutdown_timeout_s"] > engine["graceful_shutdown_timeout_s"] == 20
    (parameter,) = inspect.signature(app).parameters.values()
    assert parameter.annotation is RaySettings  # which Ray reads it as
    # Ray checks all options when an application is bound
    assert isinstance(app(RaySettings(replicas=2, placement_group_bundles=[{"CPU": 1}])), Application)
