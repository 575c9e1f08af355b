"""docs/serving.md names what there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from alula.server.config import ServerConfig
from alula.server.protocol import ChatBody, CompletionBody
from tests.server.running import Running
from tests.server.test_cancel import post

SPEAKING = {"model", "user", "messages", "prompt", "frequency_penalty", "presence_penalty", "repetition_penalty"}


def test_every_flag(root: Path) -> None:
    text = (root / "docs" / "serving.md").read_text()
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(ServerConfig)} | {"--no-prefix-caching"}
    assert flags - set(re.findall(r"--[\w-]+", text)) == set()


def test_every_field(root: Path) -> None:
    named = set(re.findall(r"`(\w+)`", (root / "docs" / "serving.md").read_text()))
    assert {*CompletionBody.model_fields, *ChatBody.model_fields} - named - SPEAKING == set()


def test_every_metric(root: Path, server: Running) -> None:
    named = set(re.findall(r"`(alula:\w+)`", (root / "docs" / "serving.md").read_text()))
    post(server, {"prompt": "x", "max_tokens": 8, "ignore_eos": True})
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    exported = {family.name + "_total" * (family.type == "counter") for family in families}
    exported = {name for name in exported if not name.endswith("_created")}
    assert exported == named


def test_every_path(root: Path, server: Running) -> None:
    named = set(re.findall(r"`(?:GET|POST|DELETE) (/[\w/{}.]*)`", (root / "docs" / "serving.md").read_text()))
    assert set(httpx.get(f"{server.url}/openapi.json").json()["paths"]) == named - {"/openapi.json"}
