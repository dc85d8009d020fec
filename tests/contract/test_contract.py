"""The contract that apps are built from: what is checked in is current, and the daemon does what it says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from freetoken.core.errors import leaves
from freetoken.daemon.contract.__main__ import documents
from freetoken.daemon.contract.answers import ANSWERS
from freetoken.daemon.contract.happenings import EVENTS
from freetoken.daemon.routes import BASE, ROUTES, SOCKET, Route, Scope
from tests.fakes.folder import tiny_folder
from tests.fakes.running import Daemon, event_stream, running
from tests.fakes.serving import Answer, ask

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "app-bridge" / "contract"
HTTP = [route for route in ROUTES if route.method != SOCKET]
ENDLESS = f"{BASE}/events"


@cache
def openapi() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "control.openapi.json").read_text())
    return found


def name_of(route: Route) -> str:
    return f"{route.method} {route.path}"


def check(answer: Answer, method: str, path: str) -> None:
    """The answer is one that the document promises for this route."""
    responses = openapi()["paths"][path][method.lower()]["responses"]
    promised = responses.get(str(answer.status)) or openapi()["components"]["responses"]["Problem"]
    ((media_type, content),) = promised["content"].items()
    assert answer.headers["content-type"].partition(";")[0] == media_type
    Draft202012Validator({**content["schema"], "components": openapi()["components"]}).validate(answer.json)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One with a model loaded."""
    folder = tmp_path_factory.mktemp("contract")
    with running(folder / "home", "--port", "0") as found:
        found.load(tiny_folder(folder / "good"))
        yield found


def filled(path: str, daemon: Daemon) -> str:
    last = daemon.ask("GET", f"{BASE}/operations").json["operations"][-1]["id"]
    return path.replace("{id}", last)


# ── what is checked in ──────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", ["control.openapi.json", "events.schema.json"])
def test_the_files_are_what_the_code_says(name: str) -> None:
    written = (FOLDER / name).read_text()
    assert written == documents()[name], "run: python -m freetoken.daemon.contract app-bridge/contract"


def test_the_schemas_are_schemas_and_their_references_lead_somewhere() -> None:
    events = json.loads((FOLDER / "events.schema.json").read_text())
    Draft202012Validator.check_schema(events)
    for schema in openapi()["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for document in (events, openapi()):
        for reference in _references(document):
            place = document
            for part in reference.removeprefix("#/").split("/"):
                place = place[part]


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _references(item)


def test_every_route_is_in_the_document_and_nothing_else() -> None:
    assert {(method.upper(), path) for path, row in openapi()["paths"].items() for method in row} == {
        (route.method, route.path) for route in HTTP
    }
    assert set(ANSWERS) == {(route.method, route.path) for route in HTTP}
    assert set(openapi()["x-websockets"]) == {route.path for route in ROUTES if route.method == SOCKET}
    ids = [operation["operationId"] for row in openapi()["paths"].values() for operation in row.values()]
    assert len(set(ids)) == len(ids) == len(HTTP)
    described = [operation["summary"] for row in openapi()["paths"].values() for operation in row.values()]
    assert all(described)


# ── the real daemon ─────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("route", [route for route in HTTP if route.path != ENDLESS], ids=name_of)
def test_answers_and_refusals_have_the_promised_shape(daemon: Daemon, route: Route) -> None:
    path = filled(route.path, daemon)
    if route.method == "GET":
        answer = daemon.ask("GET", path)
        assert answer.status == 200, answer.body
        check(answer, route.method, route.path)
    if route.scope is Scope.TOKEN:
        for headers, status in (({}, 401), ({"origin": "null"}, 403), ({"host": "evil.example"}, 400)):
            refused = ask(daemon.port, route.method, path, headers)
            assert refused.status == status
            check(refused, route.method, route.path)
    wrong = daemon.ask(route.method, path, b'{"nonsense": 1}')
    assert wrong.status < 500
    check(wrong, route.method, route.path)


def test_the_answers_of_work_have_the_promised_shape(daemon: Daemon, tmp_path: Path) -> None:
    def post(path: str, body: Any = None, **headers: str) -> Any:
        answer = daemon.ask("POST", BASE + path, body, **headers)
        check(answer, "POST", BASE + path)
        return answer

    plan = {"model": "local/good", "options": {}, "machine": {"vram_bytes": 8 << 30, "ram_bytes": 32 << 30}}
    assert post("/plans", plan).status == 200
    assert post("/engine/load", {"model": "local/good"}).status == 200
    assert post("/engine/unload", {"mode": "abort"}, prefer="wait=20").status == 202
    assert post("/engine/unload").status == 200
    slow = tiny_folder(tmp_path / "slow", {"phases": [["read_weights", 10000]]})
    id = post("/engine/load", {"model": str(slow)}).json["id"]
    assert post("/engine/unload").status == 409
    cancelled = daemon.ask("POST", f"{BASE}/operations/{id}/cancel", prefer="wait=20")
    check(cancelled, "POST", f"{BASE}/operations/{{id}}/cancel")
    failing = tiny_folder(tmp_path / "failing", {"then": "fail:OUT_OF_MEMORY:no memory"})
    failed = post("/engine/load", {"model": str(failing)}, prefer="wait=20")
    assert failed.json["error"]["code"] == "OUT_OF_MEMORY"
    check(daemon.ask("GET", f"{BASE}/engine"), "GET", f"{BASE}/engine")
    check(daemon.ask("GET", f"{BASE}/operations"), "GET", f"{BASE}/operations")
    ready = daemon.ask("GET", f"{BASE}/ready")
    assert (ready.status, ready.json["ready"]) == (503, False)
    check(ready, "GET", f"{BASE}/ready")
    for strange in ("/nothing", "/" + "a" * 4000, "/a\0b", "/dev/zero"):
        assert post("/plans", {"model": strange}).json["code"] == "MODEL_NOT_FOUND"
        assert post("/engine/load", {"model": strange}).json["code"] == "MODEL_NOT_FOUND"
    assert daemon.ask("POST", f"{BASE}/engine/load", {"model": "local/good"}, prefer="wait=20").status == 202


def test_meta_names_features_and_problems_name_every_code(daemon: Daemon) -> None:
    meta = daemon.ask("GET", f"{BASE}/meta").json
    assert {"engine.load", "events", "events.ws", "logs.ws", "problems", "idempotency-key"} <= set(meta["features"])
    assert meta["limits"]["control_body_bytes"] == 1 << 20
    codes = [row["code"] for row in daemon.ask("GET", f"{BASE}/problems").json["problems"]]
    assert codes == sorted(codes) and set(leaves()) <= set(codes)
    assert {"LIFECYCLE_BUSY", "TOO_MANY_STREAMS", "IDEMPOTENCY_KEY_REUSED"} <= set(codes)


def test_events_have_the_promised_shape(tmp_path: Path) -> None:
    schema = Draft202012Validator(json.loads((FOLDER / "events.schema.json").read_text()))
    with running(tmp_path / "home", "--port", "0") as daemon, event_stream(daemon) as events:
        daemon.load(tiny_folder(tmp_path / "good", {"says": "WARNING: hot"}))
        daemon.load(tiny_folder(tmp_path / "bad", {"then": "fail:OUT_OF_MEMORY:no memory"}))
        daemon.load(tmp_path / "good")
        os.kill(daemon.ask("GET", f"{BASE}/engine").json["pid"], signal.SIGKILL)
        seen = [next(events)]
        while seen[-1]["type"] != "engine.restart_scheduled":
            seen.append(next(events))
    with running(tmp_path / "home", "--port", "0") as daemon, event_stream(daemon, "?after=other:1") as events:
        seen += [next(events) for _ in range(3)]
    for event in seen:
        event.pop("id")
        schema.validate(event)
    types = {event["type"] for event in seen}
    assert {"engine.crashed", "diagnosis.raised", "load.failed", "log.line", "plan.created", "stream.gap"} <= types
    assert types <= set(EVENTS)


def test_the_event_schema_can_fail() -> None:
    schema = Draft202012Validator(json.loads((FOLDER / "events.schema.json").read_text()))
    event = {"v": 1, "epoch": "e", "seq": 1, "type": "load.phase", "time": "t", "source": "s", "subject": None,
             "corr": None, "data": {"phase": "plan", "done": 0, "total": None, "unit": ""}}  # fmt: skip
    assert schema.is_valid(event)
    assert not schema.is_valid({**event, "seq": "1"})
    assert not schema.is_valid({**event, "data": {"phase": 5}})
    assert schema.is_valid({**event, "type": "of.another.version", "data": 5})


# ── no state change on GET ──────────────────────────────────────────────────────────────────────────────────────────
def state_of(daemon: Daemon) -> Any:
    """All that a request could change."""
    engine = daemon.ask("GET", f"{BASE}/engine").json
    kept = {name: engine[name] for name in ("state", "since", "model", "options", "operation", "pid", "failure")}
    files = {
        path: path.stat().st_mtime_ns for path in daemon.home.rglob("*") if path.is_file() and path.suffix != ".log"
    }
    return kept, daemon.ask("GET", f"{BASE}/operations").json, files


@pytest.mark.parametrize("route", HTTP, ids=name_of)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_no_get_changes_anything(daemon: Daemon, route: Route, method: str) -> None:
    path = filled(route.path, daemon)
    before = state_of(daemon)
    if route.path == ENDLESS and method == "GET":
        with event_stream(daemon) as events:
            next(events)
    else:
        answer = daemon.ask(method, f"{path}?model=local/good&mode=abort&engine=stop")
        assert answer.status in ({200, 404, 405} if (method, route.method) == ("GET", "GET") else {405})
    assert state_of(daemon) == before
    assert daemon.process.poll() is None


# ── whatever the document allows ────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_nothing_that_the_document_allows_makes_a_500(daemon: Daemon) -> None:
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    left_out = {"post_daemon_shutdown", "get_events", "get_ready"}  # ends it, endless, and 503 on purpose
    schema = schemathesis.openapi.from_dict(openapi())
    ran = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.definition.raw["operationId"] in left_out:
            continue

        @settings(
            max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy())
        def holds(case: Any) -> None:
            case.headers = {**(case.headers or {}), **daemon.token}
            case.headers.pop("Prefer", None)  # which would only wait
            response = case.call(base_url=f"http://127.0.0.1:{daemon.port}", timeout=20)
            case.validate_response(response, checks=checks)

        holds()
        ran += 1
    assert ran == len(HTTP) - len(left_out)
    assert daemon.process.poll() is None
