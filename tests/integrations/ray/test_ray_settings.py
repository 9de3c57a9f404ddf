"""Settings of a deployment on Ray, and what is said where Ray is not installed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import cocoa_integrations.ray
from cocoa_engine.errors import ConfigError, MissingExtraError
from cocoa_integrations.ray.settings import RaySettings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2, "max_replicas": 3}, "either replicas, or min_replicas and max_replicas"),
        ({"min_replicas": 2}, "max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"loading": {"model_name": "elsewhere"}}, "model: name the model with"),
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
    assert (settings.replicas, settings.num_gpus, settings.places) == (2, 0.5, 8)


def test_a_replica_queues_no_more_than_it_decodes_so_that_others_get_the_rest() -> None:
    assert RaySettings().places == 16
    assert RaySettings(max_queue=0).places == 8
    assert RaySettings(loading={"runtime": {"max_batch_size": 3, "max_queue": 5}}).places == 8
    assert RaySettings(max_batch_size=2, max_replicas=3).waiting == 12
    assert RaySettings(max_waiting=5).waiting == 5


@pytest.mark.parametrize("name", ["app", "RaySettings"])
def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"needs ray: pip install 'cocoa-integrations\[ray\]'"):
        getattr(cocoa_integrations.ray, name)
    with pytest.raises(AttributeError, match="apps"):
        _ = cocoa_integrations.ray.apps
