"""`ft daemon` and `ft serve` with the real daemon: processes, ports and signals; no model is loaded."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from freetoken.cli import daemon
from freetoken.client.discovery import Address
from freetoken.core.errors import DeadlineExceeded
from tests.cli.conftest import Ft
from tests.fakes.control import Control, write_record

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals to one process are POSIX")
FT = [sys.executable, "-c", "from freetoken.cli.main import run; run()"]


@pytest.fixture
def clean(ft: Ft) -> Iterator[None]:
    """Stops what a test leaves running."""
    yield
    ft("daemon", "stop")


def connects(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname, parts.port)) == 0


@pytest.mark.usefixtures("clean")
def test_start_status_stop(ft: Ft, home: Path) -> None:
    started = ft("daemon", "start", "--port", "0", "--json").json
    assert started["started"]
    assert connects(started["url"])
    again = ft("daemon", "start")
    assert again.code == 0
    assert again.out == f"the daemon already runs at {started['url']} (pid {started['pid']})\n"
    assert ft("daemon", "status", "--json").json["pid"] == started["pid"]
    assert ft("status").out.splitlines()[1].split() == ["engine", "stopped"]
    stopped = ft("daemon", "stop")
    assert stopped.code == 0
    assert not connects(started["url"]), "stop returns when the port is free"
    assert not psutil.pid_exists(started["pid"]) or psutil.Process(started["pid"]).status() == psutil.STATUS_ZOMBIE
    assert ft("daemon", "stop").out == "no daemon runs\n"
    assert ft("daemon", "status").code == 3


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
def test_flags_that_come_too_late_are_refused(ft: Ft) -> None:
    url = ft("daemon", "start", "--port", "0", "--json").json["url"]
    late = ft("daemon", "start", "--port", "1", "--dev-origins")
    assert late.code == 2
    assert "--port, --dev-origins would not take effect" in late.err
    assert ft("daemon", "start", "--port", str(urlsplit(url).port)).code == 0
    served = subprocess.run([*FT, "serve", "--port", "1"], capture_output=True, text=True, timeout=30)
    assert (served.returncode, ft("daemon", "status").code) == (2, 0), served.stderr


def test_a_taken_port_that_was_asked_for(ft: Ft, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = ft("daemon", "start", "--port", str(port))
    assert ran.code == 2
    assert ran.err.splitlines()[0].startswith(f"error: Port {port} is held by ")
    assert "fix: " in ran.err
    assert not (home / "runtime" / "daemon.json").exists()


def test_a_folder_of_another_program_is_left_alone(ft: Ft, home: Path) -> None:
    home.mkdir()
    (home / "theirs").touch()
    ran = ft("daemon", "start", "--json")
    assert ran.code == 2
    assert "another program" in ran.json["error"]["detail"]
    assert [path.name for path in home.iterdir()] == ["theirs"]


@pytest.mark.usefixtures("clean")
def test_a_stale_record_stops_nothing(ft: Ft, home: Path) -> None:
    write_record(home, "http://127.0.0.1:9", start_time=1.0)
    assert ft("daemon", "status").code == 3
    assert ft("daemon", "start", "--port", "0").code == 0


def test_stop_reports_a_daemon_that_stays(ft: Ft, server: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "STOP_S", 0.3)
    ran = ft("daemon", "stop")
    assert ran.code == DeadlineExceeded.exit_code
    assert f"process {psutil.Process().pid} still runs" in ran.err
    assert ("POST", "/api/v1/daemon/shutdown", {"engine": "stop"}) in server.seen


def test_a_port_that_still_listens_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "STOP_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match="still listens"):
            daemon.wait_gone(Address(url, psutil.Process().pid, 1.0, "i", "0", "t"))


# ── serve ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def serve(*args: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    child = subprocess.Popen([*FT, "serve", "--json", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout
    return child, json.loads(child.stdout.readline() or "{}")


def gone(url: str, within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while connects(url) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not connects(url)


@posix
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("home")
def test_the_daemon_of_serve_ends_with_it_however_it_ends(number: signal.Signals, code: int) -> None:
    child, hello = serve("--port", "0")
    assert hello["event"] == "listening"
    assert child.stdout
    assert json.loads(child.stdout.readline())["event"] == "ready"
    child.send_signal(number)
    assert child.wait(15) == code
    assert gone(hello["url"])


@posix
@pytest.mark.slow
@pytest.mark.usefixtures("clean")
def test_serve_beside_a_running_daemon_hands_over_and_leaves_it_alone(ft: Ft) -> None:
    url = ft("daemon", "start", "--port", "0", "--json").json["url"]
    child, hello = serve()
    assert (hello["url"], hello["attached"]) == (url, True)
    child.send_signal(signal.SIGINT)
    assert child.wait(15) == 130
    assert ft("daemon", "status").code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_serve_of_a_model_that_is_not_there_ends_with_the_reason() -> None:
    child, hello = serve("--port", "0", "--model", "nobody/nothing")
    out, _ = child.communicate(timeout=20)
    assert child.returncode == 1
    assert json.loads(out)["error"]["code"] == "MODEL_NOT_FOUND"
    assert gone(hello["url"])


def test_serve_takes_one_model(ft: Ft) -> None:
    assert ft("serve", "--demo", "--model", "x").code == 2
