"""`ft load` and `ft unload` against a scripted server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import Ft
from tests.fakes.control import Control, problem

PHASES = [
    {"state": "running", "phase": "import"},
    {"state": "running", "phase": "read_weights", "progress": {"done": 5, "total": 10, "unit": "bytes"}},
    {"state": "succeeded", "phase": "read_weights"},
]


def updates(*states: dict[str, object]) -> list[dict[str, object] | None]:
    return [{"type": "operation.updated", "data": {"id": "op1", "kind": "load", **state}} for state in states]


def test_load_shows_each_phase_and_where_it_answers(ft: Ft, server: Control) -> None:
    server.events = updates(*PHASES)
    ran = ft("load", "demo", "--num-pages", "64", "--dtype", "bfloat16")
    assert ran.code == 0
    assert ran.out == f"demo is loaded and answers at {server.url}/v1\n"
    assert [line.split(":")[0].strip() for line in ran.err.splitlines()] == ["import", "read weights"]
    body = next(body for method, path, body in server.seen if path.endswith("/load"))
    assert body == {"model": "demo", "options": {"num_pages": 64, "dtype": "bfloat16"}}


def test_load_json_is_one_object(ft: Ft, server: Control) -> None:
    server.events = updates(*PHASES)
    ran = ft("load", "demo", "--json")
    assert ran.json == {"model": "demo", "state": "ready"}
    assert ran.err == ""


def test_load_of_what_is_loaded_returns_at_once(ft: Ft, server: Control) -> None:
    server.load_status = 200
    assert ft("load", "demo").code == 0
    assert server.after == [], "no stream was needed"


def test_a_failed_load_says_why(ft: Ft, server: Control) -> None:
    server.events = updates({"state": "failed", "error": problem("WEIGHTS_MISSING", "2 of 3 shards", "get them")})
    ran = ft("load", "demo")
    assert ran.code == 1
    assert ran.err.splitlines()[-2:] == ["error: 2 of 3 shards", "  fix: get them"]


def test_a_path_is_sent_absolute_and_an_id_as_it_is(
    ft: Ft, server: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.load_status = 200
    (tmp_path / "demo").mkdir()
    (tmp_path / "x.gguf").touch()
    monkeypatch.chdir(tmp_path)
    for text in ("demo", "./demo", "x.gguf", "org/name:Q4_0"):
        assert ft("load", text).code == 0
    sent = [body["model"] for _, path, body in server.seen if path.endswith("/load")]
    assert sent == ["demo", str(tmp_path / "demo"), str(tmp_path / "x.gguf"), "org/name:Q4_0"]
    missing = ft("load", "./nothing")
    assert missing.code == 2
    assert "nothing" in missing.err


def test_unload(ft: Ft, server: Control) -> None:
    server.operation = {"id": "op1", "kind": "unload", "state": "succeeded"}
    ran = ft("unload")
    assert (ran.code, ran.out) == (0, "the engine has ended\n")
    assert ft("unload", "--json").json == {"state": "stopped"}


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT to one process is POSIX")
def test_ctrl_c_cancels_the_load_and_ends_with_130(server: Control, home: Path) -> None:
    server.events = updates({"state": "running", "phase": "import"})
    child = subprocess.Popen(
        [sys.executable, "-c", "from freetoken.cli.main import run; run()", "load", "demo"], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 10
    while not server.after and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    assert child.wait(10) == 130
    assert server.cancelled == ["op1"]
