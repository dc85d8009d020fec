"""Idempotency-Key on a real daemon: a request that is sent again does nothing again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from freetoken.daemon.idempotency import KEPT, Once
from tests.fakes.folder import tiny_folder
from tests.fakes.running import Daemon, running
from tests.fakes.serving import Answer

LOAD, UNLOAD = "/api/v1/engine/load", "/api/v1/engine/unload"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("once") / "home", "--port", "0") as found:
        yield found


def post(daemon: Daemon, key: str, path: str, body: Any, **headers: str) -> Answer:
    return daemon.ask("POST", path, body, idempotency_key=key, **headers)


def loads(daemon: Daemon) -> int:
    return len(daemon.ask("GET", "/api/v1/operations").json["operations"])


def test_the_same_request_again_gives_the_same_operation_while_it_runs_and_after(
    daemon: Daemon, tmp_path: Path
) -> None:
    body = {"model": str(tiny_folder(tmp_path / "one"))}
    first = post(daemon, "k-1", LOAD, body)
    again = post(daemon, "k-1", LOAD, body, prefer="wait=20")
    assert (first.status, again.status) == (202, 202)
    assert again.json["id"] == first.json["id"] and again.headers["location"] == first.headers["location"]
    assert again.json["state"] == "succeeded"
    ended = post(daemon, "k-2", UNLOAD, {}, prefer="wait=20").json
    before = loads(daemon)
    assert post(daemon, "k-1", LOAD, body).json["id"] == first.json["id"]  # and it is not loaded again
    assert post(daemon, "k-2", UNLOAD, {}).json["id"] == ended["id"]
    assert loads(daemon) == before
    assert daemon.ask("GET", "/api/v1/engine").json["state"] == "stopped"


def test_another_request_with_the_same_key_is_refused(daemon: Daemon, tmp_path: Path) -> None:
    body = {"model": str(tiny_folder(tmp_path / "two"))}
    assert post(daemon, "k-3", LOAD, body, prefer="wait=20").status == 202
    for path, other in ((LOAD, {"model": "else"}), (LOAD, {**body, "options": {"threads": 1}}), (UNLOAD, body)):
        refused = post(daemon, "k-3", path, other)
        assert (refused.status, refused.json["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json["request_id"] == refused.headers["x-request-id"]


def test_what_failed_or_did_nothing_may_be_tried_again_with_its_key(daemon: Daemon, tmp_path: Path) -> None:
    body = {"model": str(tmp_path / "three")}
    assert post(daemon, "k-4", LOAD, body).json["code"] == "MODEL_NOT_FOUND"
    tiny_folder(tmp_path / "three")
    assert post(daemon, "k-4", LOAD, body, prefer="wait=20").json["state"] == "succeeded"
    assert post(daemon, "k-5", LOAD, body).status == 200
    daemon.ask("POST", UNLOAD, prefer="wait=20")
    assert post(daemon, "k-5", UNLOAD, {"mode": "abort"}).status == 200  # nor is it taken by what did nothing
    assert post(daemon, "k-5", LOAD, body, prefer="wait=20").status == 202


def test_requests_at_the_same_time_are_one(daemon: Daemon, tmp_path: Path) -> None:
    body = {"model": str(tiny_folder(tmp_path / "four"))}
    before = loads(daemon)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(daemon, "k-6", LOAD, body, prefer="wait=20"), range(8)))
    assert {answer.status for answer in answers} == {202} and len({answer.json["id"] for answer in answers}) == 1
    assert loads(daemon) == before + 1


def test_without_a_key_the_lifecycle_lock_says_which_operation_runs(daemon: Daemon, tmp_path: Path) -> None:
    slow = tiny_folder(tmp_path / "slow", {"phases": [["read_weights", 10000]]})
    running = daemon.ask("POST", LOAD, {"model": str(slow)}).json["id"]
    for path, body in ((UNLOAD, {}), (LOAD, {"model": str(tiny_folder(tmp_path / "five"))})):
        busy = daemon.ask("POST", path, body)
        assert (busy.status, busy.json["code"], busy.json["numbers"]["operation"]) == (409, "LIFECYCLE_BUSY", running)
    assert daemon.ask("POST", LOAD, {"model": str(slow)}).json["id"] == running  # the same wish
    daemon.ask("POST", f"/api/v1/operations/{running}/cancel", prefer="wait=20")


@pytest.mark.parametrize("key", ["", "x" * 256, "two words", "é"])
def test_a_key_has_a_form(daemon: Daemon, key: str) -> None:
    refused = post(daemon, key, UNLOAD, {})
    assert (refused.status, refused.json["code"]) == (400, "MALFORMED_BODY")


def test_keys_are_bounded() -> None:
    async def creates(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"location", b"/api/v1/operations/op_1")]
        await send({"type": "http.response.start", "status": 202, "headers": headers})

    async def scenario() -> int:
        once = Once(creates)
        for number in range(KEPT + 10):
            headers = [(b"idempotency-key", str(number).encode())]
            scope = {"type": "http", "method": "POST", "path": LOAD, "headers": headers}
            await once(scope, _no_body, _nowhere)
        return len(once._firsts)

    assert asyncio.run(scenario()) == KEPT


async def _no_body() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _nowhere(message: Any) -> None: ...
