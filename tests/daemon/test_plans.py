"""POST /plans on a real daemon: an answer whether or not it fits, fixes that work when they are sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import serving
from tests.fakes.checkpoint import tiny
from tests.fakes.running import JSON, Daemon, running

MIB = 1 << 20


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("plans") / "home", "--port", "0") as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("qwen3_moe", tmp_path_factory.mktemp("model") / "tiny")


def ask(daemon: Daemon, model: object, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = daemon.ask("POST", "/api/v1/plans", {"model": str(model), **body})
    assert answer.status == status, answer.body
    found: dict[str, Any] = answer.json
    return found


def test_a_plan_is_an_answer_and_changes_nothing(daemon: Daemon, folder: Path) -> None:
    before = daemon.ask("GET", "/api/v1/engine").json
    plan = ask(daemon, folder)
    assert (plan["verdict"], plan["code"], plan["resolved"]["device"]["value"]) == ("fits", None, "cpu")
    after = daemon.ask("GET", "/api/v1/engine").json
    assert (after["state"], after["model"]) == (before["state"], before["model"]) == ("stopped", None)


def test_what_does_not_fit_is_an_answer_too_and_its_fix_works(daemon: Daemon, folder: Path) -> None:
    small = {"ram_bytes": 700 * MIB}
    refused = ask(daemon, folder, options={"num_tokens": 10_000_000}, machine=small)
    assert (refused["verdict"], refused["code"]) == ("does_not_fit", "KV_TOO_LARGE")
    fix = refused["fixes"][0]
    assert fix["set"] == {"--num-tokens": refused["numbers"]["largest_tokens"]}
    mended = ask(daemon, folder, options={"num_tokens": 10_000_000} | fix["options"], machine=small)
    assert mended["verdict"].startswith("fits") and mended["total_bytes"] <= mended["budget_bytes"]


def test_a_card_can_be_described(daemon: Daemon, folder: Path) -> None:
    plan = ask(daemon, folder, machine={"vram_bytes": 8 << 30, "ram_bytes": 32 << 30})
    assert plan["resolved"]["device"]["value"] == "cuda"
    assert {"attention_workspace", "cuda_context"} <= {line["line"] for line in plan["ledger"]}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "org/none"}, 404, "MODEL_NOT_FOUND"),
        ({"model": "/nowhere/at/all"}, 404, "MODEL_NOT_FOUND"),
        ({"options": {"home": "/"}}, 400, "BAD_SETTING"),
        ({"options": {"num_tokens": "many"}}, 400, "BAD_SETTING"),
        ({"options": {"moe_backend": "offload"}}, 400, "BAD_SETTING"),
        ({"machine": {"ram_bytes": -1}}, 400, "MALFORMED_BODY"),
        ({"surplus": 1}, 400, "MALFORMED_BODY"),
    ],
)
def test_bad_questions_are_refused(daemon: Daemon, folder: Path, body: dict[str, Any], status: int, code: str) -> None:
    answer = daemon.ask("POST", "/api/v1/plans", {"model": str(folder)} | body)
    assert (answer.status, answer.json["code"]) == (status, code)


def test_it_needs_the_token(daemon: Daemon, folder: Path) -> None:
    body = json.dumps({"model": str(folder)}).encode()
    assert serving.ask(daemon.port, "POST", "/api/v1/plans", JSON, body).status == 401


def test_a_load_that_does_not_fit_brings_its_plan(daemon: Daemon, folder: Path) -> None:
    operation = daemon.load(folder, num_tokens=1_000_000_000)
    assert operation["state"] == "failed"
    error = operation["error"]
    assert error["code"] == "KV_TOO_LARGE" and error["plan"]["verdict"] == "does_not_fit"
    fix = error["fixes"][0]
    assert fix["options"] == {"num_tokens": error["numbers"]["largest_tokens"]} and fix["action"]["options"]
