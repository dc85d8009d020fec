"""The client against a server that speaks the documented shapes over a real socket."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from freetoken.client import control as control_module
from freetoken.client.control import ControlClient
from freetoken.client.discovery import find
from freetoken.core import errors
from tests.fakes.control import TOKEN, Control, control_server, problem, write_record


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Control]:
    with control_server(tmp_path) as control:
        yield control


@pytest.fixture
def client(tmp_path: Path, server: Control) -> Iterator[ControlClient]:
    with ControlClient(find(tmp_path)) as client:
        yield client


def updated(**facts: object) -> dict[str, object]:
    return {"type": "operation.updated", "seq": 2, "data": {"id": "op1", "kind": "load", **facts}}


# ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_live_is_asked_without_the_token(client: ControlClient, server: Control) -> None:
    assert client.live().service == "freetoken"
    assert "authorization" not in {name.lower() for name in server.seen[0][2]}
    client.engine()
    assert server.seen[1][2]["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("live", [{"service": "nginx"}, {}, {"service": "freetoken", "instance_id": "another"}])
def test_another_program_at_the_address_gets_no_token(
    client: ControlClient, server: Control, live: dict[str, str]
) -> None:
    server.live = live
    with pytest.raises(errors.DaemonNotReachable, match="another program"):
        client.live()
    assert all("authorization" not in headers for _, _, headers in server.seen)


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    write_record(tmp_path, f"http://127.0.0.1:{port}")
    with ControlClient(find(tmp_path)) as client, pytest.raises(errors.DaemonNotReachable) as caught:
        client.live()
    assert str(port) in caught.value.detail


def test_a_server_that_never_answers_meets_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        write_record(tmp_path, f"http://127.0.0.1:{mute.getsockname()[1]}")
        with ControlClient(find(tmp_path)) as client, pytest.raises(errors.DeadlineExceeded, match="within 0 s"):
            client._call("GET", "/api/v1/live", within_s=0.2)
        monkeypatch.setattr(control_module, "SILENCE_S", 0.2)
        with ControlClient(find(tmp_path)) as client, pytest.raises(errors.DeadlineExceeded, match="sent nothing"):
            next(client.events())


def test_proxies_of_the_environment_are_not_used(
    tmp_path: Path, server: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with ControlClient(find(tmp_path)) as client:
        assert client.live().service == "freetoken"


@pytest.mark.parametrize(
    ("status", "body", "kind", "exit_code"),
    [
        (409, problem("LIFECYCLE_BUSY", "a load runs"), errors.LifecycleBusy, 1),
        (409, problem("DOES_NOT_FIT", "needs 9 GiB", "use a smaller model"), errors.PlanError, 6),
        (401, problem("UNAUTHORIZED", "no"), errors.Unauthorized, 4),
        (418, problem("NEWER_THAN_US", "something new"), errors.DaemonError, 1),
    ],
)
def test_problems_become_typed_errors(
    client: ControlClient, server: Control, status: int, body: dict[str, object], kind: type, exit_code: int
) -> None:
    server.load_status, server.load_answer = status, body
    with pytest.raises(errors.FreeTokenError) as caught:
        client.load("demo")
    assert type(caught.value) is kind
    assert caught.value.exit_code == exit_code
    assert caught.value.detail == body["detail"]
    assert list(caught.value.fixes) == [fix["title"] for fix in body["fixes"]]  # type: ignore[attr-defined]


def test_load_sends_the_options_and_knows_what_is_loaded_already(client: ControlClient, server: Control) -> None:
    operation = client.load("demo", {"num_pages": 64})
    assert operation is not None
    assert operation.id == "op1"
    assert server.seen[-1] == ("POST", "/api/v1/engine/load", {"model": "demo", "options": {"num_pages": 64}})
    server.load_status = 200
    assert client.load("demo") is None


# ── following ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_follow_sees_the_phases_and_the_end(client: ControlClient, server: Control) -> None:
    server.events = [
        {"type": "stream.hello", "data": {}},
        {"type": "stream.snapshot", "data": {"operations": [{"id": "op1", "state": "running", "phase": "import"}]}},
        updated(state="running", phase="read_weights", progress={"done": 1, "total": 4, "unit": "bytes"}),
        {"type": "operation.updated", "data": {"id": "another", "state": "failed"}},
        updated(state="succeeded", phase="warmup"),
    ]
    seen = [(op.state, op.phase, op.progress and op.progress.done) for op in client.follow("op1")]
    assert seen[1:] == [("running", "import", None), ("running", "read_weights", 1), ("succeeded", "warmup", None)]


def test_follow_of_a_finished_operation_opens_no_stream(client: ControlClient, server: Control) -> None:
    server.operation = {"id": "op1", "state": "succeeded"}
    assert [op.state for op in client.follow("op1")] == ["succeeded"]
    assert server.after == []


def test_an_operation_that_ended_between_asking_and_listening_is_seen_in_the_snapshot(
    client: ControlClient, server: Control
) -> None:
    server.events = [{"type": "stream.snapshot", "data": {"operations": [{"id": "op1", "state": "succeeded"}]}}]
    assert [op.state for op in client.follow("op1")] == ["running", "succeeded"]


def test_follow_raises_the_error_of_the_operation(client: ControlClient, server: Control) -> None:
    server.events = [updated(state="failed", error=problem("WEIGHTS_MISSING", "2 of 3 shards are missing", "get them"))]
    with pytest.raises(errors.WeightsMissing, match="2 of 3 shards") as caught:
        list(client.follow("op1"))
    assert caught.value.fixes == ("get them",)


@pytest.mark.parametrize(("state", "kind"), [("cancelled", errors.LoadCancelled), ("interrupted", errors.DaemonError)])
def test_follow_raises_for_other_ends(
    client: ControlClient, server: Control, state: str, kind: type[Exception]
) -> None:
    server.events = [updated(state=state)]
    with pytest.raises(kind, match=state):
        list(client.follow("op1"))


def test_events_go_on_where_the_connection_broke(client: ControlClient, server: Control) -> None:
    server.events = [{"type": "a"}, {"type": "b"}, None, {"type": "c"}]
    assert [event.type for event in islice(client.events(), 3)] == ["a", "b", "c"]
    assert server.after == [None, "2"]


def test_a_stream_that_only_greets_and_breaks_is_given_up(client: ControlClient, server: Control) -> None:
    """A daemon that fails on the same event each time must not be asked for ever."""
    server.events = [{"type": "a"}, *([{"type": "stream.hello"}, None] * 20)]
    with pytest.raises(errors.DaemonNotReachable):
        list(islice(client.events(), 30))
    assert len(server.after) == 1 + control_module.RECONNECTS


def test_events_end_when_the_daemon_is_gone(tmp_path: Path) -> None:
    with control_server(tmp_path) as server, ControlClient(find(tmp_path)) as client:
        server.events = [{"type": "a"}, None]
        stream = client.events()
        assert next(stream).type == "a"
        client.address = dataclasses.replace(client.address, start_time=0.0)  # its process has ended
        with pytest.raises(errors.DaemonNotReachable):
            next(stream)


# ── chat ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_chat_gives_text_then_usage(client: ControlClient, server: Control) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    server.say("Pa", "ris", usage=usage)
    pieces = list(client.chat({"model": "demo", "messages": []}))
    assert [piece.text for piece in pieces if piece.text] == ["Pa", "ris"]
    assert [piece.finish for piece in pieces if piece.finish] == ["stop"]
    assert (pieces[-1].prompt_tokens, pieces[-1].completion_tokens, pieces[-1].cached_tokens) == (7, 2, 3)
    assert server.seen[-1][2]["stream_options"] == {"include_usage": True}


def openai_error(code: str, message: str, *fixes: str) -> dict[str, object]:
    return {"error": {"message": message, "code": None, "freetoken_code": code, "numbers": {}, "fixes": list(fixes)}}


def test_a_refusal_before_the_stream(client: ControlClient, server: Control) -> None:
    message, fixes = "demo is not loaded. Run `ft load demo`. Or wait.", ("ft load demo", "Or wait.")
    server.chat_status, server.chat = 409, [openai_error("MODEL_NOT_LOADED", message, *fixes)]
    with pytest.raises(errors.ModelNotLoaded) as caught:
        next(client.chat({}))
    assert caught.value.detail == "demo is not loaded."
    assert caught.value.fixes == fixes


def test_an_error_in_mid_stream(client: ControlClient, server: Control) -> None:
    server.chat = [
        {"choices": [{"delta": {"content": "Pa"}}]},
        openai_error("ENGINE_DIED", "the engine was killed"),
        None,
    ]
    stream = client.chat({})
    assert next(stream).text == "Pa"
    with pytest.raises(errors.EngineDied, match="killed"):
        next(stream)


def test_a_stream_that_breaks_off_is_not_taken_for_an_answer(client: ControlClient, server: Control) -> None:
    server.chat = [{"choices": [{"delta": {"content": "Pa"}}]}, None]
    stream = client.chat({})
    assert next(stream).text == "Pa"
    with pytest.raises(errors.EngineError):
        next(stream)


def test_closing_the_stream_hangs_up(client: ControlClient, server: Control) -> None:
    server.chat = [{"choices": [{"delta": {"content": "Pa"}}]}]
    stream = client.chat({})
    assert next(stream).text == "Pa"
    stream.close()
    assert server.hung_up.wait(5)


def test_v1_gets_the_api_key_and_never_the_token(tmp_path: Path, server: Control) -> None:
    server.say("ok")
    for key in ("k", None):
        with ControlClient(find(tmp_path), api_key=key) as client:
            list(client.chat({}))
    assert server.keys == ["Bearer k", None]


def test_a_refused_api_key(client: ControlClient, server: Control) -> None:
    server.chat_status, server.chat = 401, [openai_error("UNAUTHORIZED", "a key is needed")]
    with pytest.raises(errors.Unauthorized):
        next(client.chat({}))
