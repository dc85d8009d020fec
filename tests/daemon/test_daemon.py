"""The daemon as a process: found, asked, attacked, stopped. The engine is tests.fakes.worker, all else is real."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from freetoken.core.errors import PortInUse
from freetoken.daemon import discovery, store
from freetoken.daemon.guard import OPEN_PATHS
from freetoken.daemon.native import FileLock
from tests.fakes.folder import tiny_folder
from tests.fakes.running import JSON, Daemon, event_stream, running
from tests.fakes.serving import ask


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon") / "home", "--port", "0") as found:
        yield found


# ── identity and discovery ──────────────────────────────────────────────────────────────────────────────────────────
def test_it_can_be_found_and_is_small_while_idle(daemon: Daemon) -> None:
    record = json.loads((daemon.home / "runtime" / "daemon.json").read_text())
    assert (daemon.home / "runtime" / "daemon.json").stat().st_mode & 0o777 == 0o600
    assert record["pid"] == daemon.process.pid
    for path in ("/live", "/health", "/api/v1/live"):
        answer = ask(daemon.port, "GET", path)
        assert answer.json == {"service": "freetoken", "api_version": "1", "instance_id": record["instance_id"]}
    daemon.ask("GET", "/api/v1/engine")  # the application is imported now
    assert psutil.Process(daemon.process.pid).memory_info().rss <= 80 << 20


def test_an_idle_daemon_has_not_imported_what_only_a_model_needs() -> None:
    code = "import freetoken.daemon.main, freetoken.daemon.app, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "tokenizers", "transformers", "httpx", "rich", "jinja2"} & set(found)


def test_nothing_slow_is_imported_before_it_listens() -> None:
    code = "import freetoken.daemon.main, freetoken.daemon.front, uvicorn.server, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"fastapi", "pydantic", "starlette", "freetoken.catalog", "freetoken.plan", "freetoken.text"} & set(
        found
    )


def test_a_second_daemon_says_where_the_first_one_is(daemon: Daemon) -> None:
    for arguments in ([], ["--owned"]):
        second = Daemon(daemon.home, *arguments)
        out, said = second.process.communicate(timeout=20)
        assert second.process.returncode == 0
        if arguments:
            line = json.loads(out)
            assert (line["event"], line["attached"], line["pid"]) == ("listening", True, daemon.process.pid)
        else:
            assert out == "" and f"already runs at http://127.0.0.1:{daemon.port}" in said


def test_owned_mode_shakes_hands_and_ends_with_its_parent(tmp_path: Path) -> None:
    owned = Daemon(tmp_path / "home", "--owned", "--port", "0")
    assert owned.process.stdout is not None and owned.process.stdin is not None
    line = json.loads(owned.process.stdout.readline())
    assert set(line) == {
        "event", "url", "pid", "start_time", "api_version", "instance_id", "token_file", "attached",
    }  # fmt: skip
    assert line["attached"] is False and line["pid"] == owned.process.pid
    owned.wait_listening()
    assert owned.load(tiny_folder(tmp_path / "good"))["state"] == "succeeded"
    engine = owned.ask("GET", "/api/v1/engine").json["pid"]
    owned.process.stdin.close()
    assert owned.process.wait(15) == 0
    assert not psutil.pid_exists(engine)
    assert (owned.home / "token").read_text().strip() not in json.dumps(line)


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("x")
    stranger = Daemon(tmp_path, "--port", "0")
    out, said = stranger.process.communicate(timeout=20)
    assert (stranger.process.returncode, out) == (2, "")
    assert said.startswith("error: ") and "fix: " in said
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_port_that_was_given_and_is_held_names_the_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        refused = Daemon(tmp_path / "home", "--port", str(port))
        _, said = refused.process.communicate(timeout=20)
        assert refused.process.returncode == 2
        assert f"Port {port} is held by {psutil.Process().name()} (pid {os.getpid()})" in said
        claimed = discovery.claim_port("127.0.0.1", port, given=False)
        assert claimed.port != port and str(os.getpid()) in (claimed.note or "")
        claimed.socket.close()
        with pytest.raises(PortInUse):
            discovery.claim_port("127.0.0.1", port, given=True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--host", "0.0.0.0"], 5, "no API key is set"),
        (["--port", "99999"], 2, "flag --port: 99999 is out of range"),
        (["--cors-origins", "nonsense"], 2, "flag --cors-origins: 'nonsense' is not an origin"),
    ],
)
def test_a_bad_start_says_why_and_leaves(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    refused = Daemon(tmp_path / "home", *arguments)
    _, err = refused.process.communicate(timeout=20)
    assert (refused.process.returncode, said in err) == (code, True), err


@pytest.mark.slow
def test_a_record_of_a_process_that_is_another_one_is_not_believed(tmp_path: Path) -> None:
    home = store.open_home(tmp_path / "home")
    us = psutil.Process()
    record = {"url": "http://127.0.0.1:1", "instance_id": "x", "version": "0", "api_version": "1"}
    for pid, began in ((us.pid, us.create_time()), (us.pid, 1.0), (2**22 - 1, 1.0)):
        store.write_json(home.daemon_record, {**record, "pid": pid, "start_time": began})
        assert discovery.running(home) is None
    with running(home.root, "--port", "0") as daemon:
        assert ask(daemon.port, "GET", "/live").status == 200


@pytest.mark.slow
def test_an_older_daemon_is_replaced_and_a_newer_one_is_not(tmp_path: Path) -> None:
    older = Daemon(tmp_path / "home", "--port", "0", environ={"FAKE_VERSION": "0.0.9"})
    older.wait_listening()
    with running(tmp_path / "home", "--port", "0") as daemon:
        assert older.process.wait(10) == 0
        older.end()
        again = Daemon(daemon.home, "--port", "0", environ={"FAKE_VERSION": "0.0.10"})
        _, said = again.process.communicate(timeout=20)
        assert again.process.returncode == 1 and "A newer daemon" in said
        assert ask(daemon.port, "GET", "/live").status == 200


@pytest.mark.slow
def test_a_lock_is_freed_by_any_death(tmp_path: Path) -> None:
    with running(tmp_path / "home", "--port", "0") as daemon:
        home = store.Home(daemon.home)
        assert FileLock.take(home.lock) is None
        daemon.process.kill()
        daemon.process.wait(10)
        lock = FileLock.take(home.lock)
        assert lock is not None
        lock.release()
        assert discovery.running(home) is None


def test_shutdown_ends_engine_streams_and_port(tmp_path: Path) -> None:
    with running(tmp_path / "home", "--port", "0") as daemon:
        daemon.load(tiny_folder(tmp_path / "good"))
        engine = daemon.ask("GET", "/api/v1/engine").json["pid"]
        with event_stream(daemon) as events:
            next(events)
            began = time.monotonic()
            assert daemon.ask("POST", "/api/v1/daemon/shutdown", {"engine": "stop"}).status == 202
            assert daemon.process.wait(15) == 0
            assert time.monotonic() - began < 8
        assert not psutil.pid_exists(engine)
        assert not (daemon.home / "runtime" / "daemon.json").exists()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", daemon.port), timeout=1)


# ── the control API ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_errors_are_problems_with_a_code(daemon: Daemon) -> None:
    def problem(method: str, path: str, body: Any = None) -> tuple[int, str]:
        answer = daemon.ask(method, path, body)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json["instance"] == path and answer.json["request_id"] == answer.headers["x-request-id"]
        assert answer.json["detail"] and "Traceback" not in answer.json["detail"]
        return answer.status, answer.json["code"]

    load = "/api/v1/engine/load"
    assert problem("POST", load, b'{"model": ') == (400, "MALFORMED_BODY")
    assert problem("POST", load, {"modle": "x"}) == (400, "MALFORMED_BODY")
    assert problem("POST", load, {"model": "x", "worker": "/bin/sh"}) == (400, "MALFORMED_BODY")
    assert problem("POST", load, {"model": "demo", "options": {}}) == (404, "MODEL_NOT_FOUND")
    assert problem("GET", "/api/v1/operations/op_1") == (404, "OPERATION_NOT_FOUND")
    assert problem("GET", "/api/v1/nothing") == (404, "ROUTE_NOT_FOUND")
    assert problem("GET", "/nothing") == (404, "ROUTE_NOT_FOUND")
    assert problem("PUT", "/api/v1/engine") == (405, "METHOD_NOT_ALLOWED")
    assert problem("GET", load) == (405, "METHOD_NOT_ALLOWED")


def test_the_guard_stands_before_it(daemon: Daemon) -> None:
    assert ask(daemon.port, "GET", "/api/v1/engine").status == 401
    hostile = {"origin": "http://evil.example", **daemon.token}
    assert ask(daemon.port, "POST", "/api/v1/daemon/shutdown", hostile).status == 403
    assert ask(daemon.port, "GET", "/live", {"host": "evil.example"}).status == 400
    assert daemon.process.poll() is None


def test_open_rows_of_the_table_are_the_guards_open_paths() -> None:
    from freetoken.daemon.routes import ROUTES, Scope

    assert {route.path for route in ROUTES if route.scope is Scope.OPEN} == OPEN_PATHS
    assert all(route.path.startswith("/api/") for route in ROUTES if route.scope is Scope.TOKEN)
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


def test_load_follow_ask_unload(daemon: Daemon, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "good")
    answer = daemon.ask("POST", "/api/v1/engine/load", {"model": str(model)})
    assert answer.status == 202 and answer.headers["location"].endswith(answer.json["id"])
    done = daemon.ask("GET", f"/api/v1/operations/{answer.json['id']}", prefer="respond-async, wait=20").json
    assert (done["state"], done["error"]) == ("succeeded", None)
    assert daemon.ask("POST", "/api/v1/engine/load", {"model": "local/good"}).status == 200
    engine = daemon.ask("GET", "/api/v1/engine").json
    assert (engine["state"], engine["model"], engine["operation"]) == ("ready", "local/good", None)
    body = {"model": "local/good", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    chat = ask(daemon.port, "POST", "/v1/chat/completions", JSON, json.dumps(body).encode())
    assert chat.status == 200 and chat.json["usage"]["completion_tokens"] == 3
    assert [row["id"] for row in ask(daemon.port, "GET", "/v1/models").json["data"]] == ["local/good"]
    assert daemon.ask("POST", "/api/v1/engine/unload", prefer="wait=20").json["state"] == "succeeded"
    assert daemon.ask("POST", "/api/v1/engine/unload").status == 200
    gone = ask(daemon.port, "POST", "/v1/chat/completions", JSON, json.dumps(body).encode())
    assert (gone.status, gone.json["error"]["freetoken_code"]) == (409, "MODEL_NOT_LOADED")
    assert "ft load local/good" in gone.json["error"]["message"]


def test_a_load_can_be_cancelled_over_the_api(daemon: Daemon, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "slow", {"phases": [["read_weights", 10000]]})
    id = daemon.ask("POST", "/api/v1/engine/load", {"model": str(model)}).json["id"]
    busy = daemon.ask("POST", "/api/v1/engine/unload")
    assert (busy.status, busy.json["code"]) == (409, "LIFECYCLE_BUSY")
    ended = daemon.ask("POST", f"/api/v1/operations/{id}/cancel", prefer="wait=10").json
    assert ended["state"] == "cancelled"
    assert daemon.ask("GET", "/api/v1/engine").json["state"] == "stopped"


def test_events_begin_with_a_snapshot_and_resume_where_they_broke(daemon: Daemon, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "good")
    with event_stream(daemon) as events:
        hello, snapshot = next(events), next(events)
        assert (hello["type"], hello["id"], snapshot["type"]) == ("stream.hello", None, "stream.snapshot")
        assert set(snapshot["data"]) == {"daemon", "engine", "operations", "downloads", "gpus"}
        assert snapshot["data"]["engine"]["state"] == "stopped"
        daemon.load(model)
        seen = [next(events)]
        while seen[-1]["type"] != "load.completed":
            seen.append(next(events))
        states = [event["data"]["state"] for event in seen if event["type"] == "engine.state_changed"]
        assert states == ["starting", "loading", "warming", "ready"]
        assert [event["seq"] for event in seen] == sorted({event["seq"] for event in seen})
    middle = len(seen) // 2
    for how in ({"query": f"?after={seen[middle]['id']}"}, {"last-event-id": seen[middle]["id"]}):
        with event_stream(daemon, **how) as events:
            assert next(events)["type"] == "stream.hello"
            assert [next(events)["seq"] for _ in seen[middle + 1 :]] == [e["seq"] for e in seen[middle + 1 :]]
    with event_stream(daemon, "?after=another-daemon:5&types=engine") as events:
        assert [next(events)["type"] for _ in range(3)] == ["stream.hello", "stream.gap", "stream.snapshot"]
    daemon.ask("POST", "/api/v1/engine/unload", prefer="wait=20")


def test_kill_9_of_the_engine_ends_the_answer_with_an_error_and_the_daemon_goes_on(
    daemon: Daemon, tmp_path: Path
) -> None:
    daemon.load(tiny_folder(tmp_path / "good"))
    body = {"model": "local/good", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=10)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    os.kill(daemon.ask("GET", "/api/v1/engine").json["pid"], signal.SIGKILL)
    killed = time.monotonic()
    rest = response.read().decode()
    assert time.monotonic() - killed < 1.0
    last = json.loads(rest.strip().rpartition("data: ")[2])
    assert last["error"]["freetoken_code"] == "ENGINE_DIED" and "[DONE]" not in rest
    deadline = time.monotonic() + 5
    while (engine := daemon.ask("GET", "/api/v1/engine").json)["state"] != "failed":
        assert time.monotonic() < deadline
    assert engine["failure"]["numbers"]["signal"] == "SIGKILL" and engine["failure"]["fixes"]
    assert daemon.load(tmp_path / "good")["state"] == "succeeded"
    daemon.ask("POST", "/api/v1/engine/unload", prefer="wait=20")


@pytest.mark.slow
def test_secrets_are_in_no_log_argument_or_environment_of_the_engine(tmp_path: Path) -> None:
    with running(tmp_path / "home", "--port", "0", environ={"FREETOKEN_API_KEY": "sk-very-secret"}) as daemon:
        daemon.load(tiny_folder(tmp_path / "good"))
        assert ask(daemon.port, "GET", "/v1/models").status == 401
        engine = psutil.Process(daemon.ask("GET", "/api/v1/engine").json["pid"])
        daemon.ask("GET", "/api/v1/nothing")
        token = (daemon.home / "token").read_text().strip()
        shown = " ".join([*engine.cmdline(), *engine.environ().values(), *psutil.Process(daemon.process.pid).cmdline()])
        logs = "".join(path.read_text() for path in (daemon.home / "logs").iterdir())
        for secret in (token, "sk-very-secret"):
            assert secret not in shown and secret not in logs
