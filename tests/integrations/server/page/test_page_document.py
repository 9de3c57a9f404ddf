"""The page as a document: its policy, its data, and that it needs no key."""

from __future__ import annotations

import json
import re

from fastapi.testclient import TestClient

from cocoa_engine import METHODS, CocoaConfig
from cocoa_engine.rendering.highlights import BOUNDS
from cocoa_integrations.server.app import create_app
from cocoa_integrations.server.routes.page import SETTINGS
from cocoa_integrations.server.settings import ServerSettings
from tests.helpers.obedient import Obedient

HOST = "http://127.0.0.1"


def client(**settings: object) -> TestClient:
    return TestClient(create_app(Obedient(), ServerSettings(**settings)), base_url=HOST)


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_the_page_is_self_contained_and_its_policy_allows_its_own_styles_and_scripts_only() -> None:
    here = client()
    answers = [here.get("/") for _ in range(2)]
    nonces = []
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-store"
        rules = dict(rule.strip().split(" ", 1) for rule in answer.headers["content-security-policy"].split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["connect-src"] == "'self'"
        assert rules["frame-ancestors"] == "'none'"
        (nonce,) = set(re.findall(r'nonce="(.*?)"', answer.text))
        assert rules["script-src"] == rules["style-src"] == f"'nonce-{nonce}'"
        nonces.append(nonce)
    assert nonces[0] != nonces[1]
    page = answers[0].text
    assert "{style}" not in page
    assert not re.search(r'(?:src|href)="(?!data:)|\burl\(|@import|https?://|\son\w+="|\sstyle="', page)
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert unsafe not in page


def test_the_page_knows_the_settings_and_the_levels_of_the_engine() -> None:
    engine = Obedient()
    engine.config = CocoaConfig(method="greedy", alpha=1.25)
    data = data_of(TestClient(create_app(engine), base_url=HOST).get("/").text)
    assert data["methods"] == list(METHODS)
    assert data["method"] == "greedy"
    assert data["bounds"] == list(BOUNDS[1:-1])
    assert data["needs_key"] is False
    fields = {one["name"]: one for one in data["settings"]}  # type: ignore[attr-defined]
    assert list(fields) == list(SETTINGS)
    assert fields["alpha"]["default"] == 1.25
    assert fields["alpha"]["step"] == "any"
    assert fields["seed"]["step"] == "1"
    assert "fixed" in fields["span_boundary"]["choices"]
    assert fields["gamma"]["description"] == CocoaConfig.model_fields["gamma"].description


def test_the_page_needs_no_key_and_no_loaded_model() -> None:
    locked = client(api_keys=("secret",))
    page = locked.get("/")
    assert page.status_code == 200
    assert data_of(page.text)["needs_key"] is True
    assert "secret" not in page.text
    assert locked.get("/v1/models").status_code == 401
    loading = TestClient(create_app(Obedient), base_url=HOST)  # its lifespan has not begun
    assert loading.get("/").status_code == 200
    assert loading.get("/v1/models").status_code == 503
