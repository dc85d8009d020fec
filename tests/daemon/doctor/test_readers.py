"""The readers on real files, sockets and processes."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from freetoken.daemon import discovery, store
from freetoken.daemon.doctor import read_home, read_machine
from freetoken.daemon.doctor.facts import Folder, Port, Record, Torch
from freetoken.daemon.doctor.repair import repair
from freetoken.daemon.state import Identity
from freetoken.daemon.store import Home, open_home, read_or_make_token
from tests.fakes.folder import tiny_folder


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


@contextmanager
def server(answer: dict[str, str] | None) -> Iterator[int]:
    """An HTTP server on a port of its own: GET gives `answer`, or a page that is no JSON."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode() if answer else b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running.server_port
        running.shutdown()


def write_record(home: Home, pid: int, start_time: float, port: int = 1) -> None:
    identity = Identity("abc", "1.0", f"http://127.0.0.1:{port}", pid, start_time)
    discovery.write_record(home, identity)


def me() -> float:
    return float(psutil.Process().create_time())


# ── the state folder ────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_folder_of_ours(home: Home) -> None:
    assert read_home.folder(home) == Folder(str(home.root), exists=True, mode=0o700)
    read_or_make_token(home)
    home.token_file.chmod(0o644)
    home.root.chmod(0o755)
    shutil.rmtree(home.logs)
    found = read_home.folder(home)
    assert (found.mode, found.token_mode, found.missing) == (0o755, 0o644, ("logs",))


def test_a_folder_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """The public FreeToken 0.2.1 uses ~/.freetoken too."""
    theirs = tmp_path / "home"
    theirs.mkdir(mode=0o755)
    (theirs / "config.toml").write_text("x")
    found = read_home.folder(Home(theirs))
    assert found.foreign is not None and "freetoken-home.json" in found.foreign
    assert repair(Home(theirs)) == []
    assert [path.name for path in theirs.iterdir()] == ["config.toml"]
    assert theirs.stat().st_mode & 0o777 == 0o755


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    absent = Home(tmp_path / "none")
    assert not read_home.folder(absent).exists
    assert repair(absent) == []
    assert not absent.root.exists()


def test_repair_tightens_makes_and_removes_and_nothing_else(home: Home) -> None:
    token = read_or_make_token(home)
    (home.models / "mine.gguf").write_text("weights")
    home.token_file.chmod(0o644)
    home.root.chmod(0o755)
    shutil.rmtree(home.logs)
    write_record(home, os.getpid(), me() - 1000.0)
    done = repair(home)
    assert len(done) == 4, done
    assert repair(home) == [], "the second time there is nothing to do"
    assert read_home.folder(home) == Folder(str(home.root), exists=True, mode=0o700, token_mode=0o600)
    assert not home.daemon_record.exists()
    assert home.token_file.read_text().strip() == token
    assert (home.models / "mine.gguf").read_text() == "weights"


def test_what_cannot_be_repaired_is_said(home: Home) -> None:
    (home.root / "logs").rmdir()
    (home.root / "logs").symlink_to(home.root / "nowhere" / "logs")
    (done,) = repair(home)
    assert done.startswith("not repaired: ") and "logs" in done


def test_a_folder_of_another_user_is_not_looked_into(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("freetoken.daemon.native.is_mine", lambda _: False)
    home.root.chmod(0o755)
    assert read_home.folder(home) == Folder(str(home.root), exists=True, mine=False, mode=0o755)
    assert repair(home) == []


# ── the daemon and its port ─────────────────────────────────────────────────────────────────────────────────────────
def test_records(home: Home) -> None:
    assert read_home.record(home) == Record("none")
    write_record(home, os.getpid(), me() - 1000.0)
    assert read_home.record(home).state == "stale", "the pid is in use again by another process (paseo #1304)"
    write_record(home, os.getpid(), me())
    assert read_home.record(home).state == "silent"
    home.daemon_record.write_text("{")
    assert read_home.record(home).state == "stale"


def test_a_record_of_a_daemon_that_answers_is_kept(home: Home) -> None:
    with server({"service": "freetoken", "instance_id": "abc"}) as number:
        write_record(home, os.getpid(), me(), number)
        assert read_home.record(home).state == "running"
        assert read_home.port(home, "127.0.0.1", number) == Port(number, "ours")
        assert repair(home) == []
        assert home.daemon_record.exists()


def test_a_record_is_not_removed_from_under_a_daemon_that_starts(home: Home) -> None:
    write_record(home, os.getpid(), me() - 1000.0)
    lock = "f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    holder = f"import fcntl, sys; {lock}; print('held', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", holder, str(home.lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    assert repair(home) == []
    child.communicate(b"\n", timeout=10)
    assert len(repair(home)) == 1


def test_ports(home: Home) -> None:
    with server({"service": "freetoken", "instance_id": "other"}) as number:
        found = read_home.port(home, "127.0.0.1", number)
        assert (found.state, found.holder) == ("other home", f"{psutil.Process().name()} (pid {os.getpid()})")
    with server(None) as number:
        assert read_home.port(home, "127.0.0.1", number).state == "stranger"
    assert read_home.port(home, "127.0.0.1", number).state == "free"


def test_a_port_whose_holder_never_answers_costs_a_deadline(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        number = silent.getsockname()[1]
        assert read_home.port(home, "127.0.0.1", number).state == "stranger"


def test_a_port_that_the_system_keeps(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """FT #322: Windows answers 10013 (WSAEACCES) for an excluded range, 10048 for one in use."""

    def refuse(*_: object) -> socket.socket:
        raise PermissionError(13, "an attempt was made to access a socket in a way forbidden")

    monkeypatch.setattr("freetoken.daemon.native.listening_socket", refuse)
    assert read_home.port(home, "127.0.0.1", 1900) == Port(1900, "reserved")
    assert read_home.port(home, "127.0.0.1", 80).holder == "needs more rights"


# ── models and the past ─────────────────────────────────────────────────────────────────────────────────────────────
def put(home: Home, name: str, **facts: object) -> Path:
    folder = home.models / name.replace("/", "--") / "main"
    folder.mkdir(parents=True)
    store.write_json(folder / "model.json", {"id": name, "source": {}, "files": {}, "state": "complete", **facts})
    return folder


def test_models_in_every_state(home: Home, tmp_path: Path) -> None:
    good = put(home, "a/good")
    tiny_folder(good)
    cut = put(home, "a/cut")
    tiny_folder(cut)
    weights = next(cut.glob("*.safetensors"))
    size = weights.stat().st_size
    os.truncate(weights, size - 100)
    sized = put(home, "a/sized", files={"config.json": {"size": 10**6}})
    tiny_folder(sized)
    put(home, "a/lacking", files={"model.safetensors": {"size": 5}})
    put(home, "a/half", state="partial")
    strange = put(home, "a/strange")
    tiny_folder(strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "architectures": ["Weird"], "model_type": "weird"}))
    put(home, "local/gone", source={"path": str(tmp_path / "gone")})
    (put(home, "a/broken") / "model.json").write_text("{")
    found = {model.id: model for model in read_home.models(home)}
    assert {name: model.state for name, model in found.items()} == {
        "a/good": "complete",
        "a/cut": "corrupt",
        "a/sized": "corrupt",
        "a/lacking": "partial",
        "a/half": "partial",
        "a/strange": "unsupported",
        "local/gone": "missing",
        "a/broken": "corrupt",
    }, found


def test_too_many_models_are_said_to_be_unread(home: Home) -> None:
    put(home, "a/b")
    assert [model.state for model in read_home.models(home, seconds=0.0)] == ["unread"]


def test_the_newest_load_that_went_well(home: Home) -> None:
    assert read_home.past(home).loaded_since is None
    rows = [
        {"kind": kind, "state": state, "updated": time}
        for kind, state, time in (
            ("load", "succeeded", "2026-01-01"),
            ("load", "failed", "2026-01-09"),
            ("unload", "succeeded", "2026-01-08"),
            ("load", "succeeded", "2026-01-03"),
        )
    ]
    store.write_json(home.operations, rows)
    assert read_home.past(home).loaded_since == "2026-01-03"


# ── the installation ────────────────────────────────────────────────────────────────────────────────────────────────
def test_torch_is_read_and_not_imported() -> None:
    code = "import sys; from freetoken.daemon.doctor.read_machine import torch; print(torch(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    import torch  # the oracle

    assert done.stdout.strip() == f"{Torch(torch.__version__, torch.version.cuda)} False"


def test_cuda_of_a_build_with_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, text in (
        ("torch-2.11.0+cu130.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0+cu130\n"),
        ("torch/version.py", "__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"),
    ):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_machine.torch() == Torch("2.11.0+cu130", "13.0")


def program(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "ft").write_text(text)
    (folder / "ft").chmod(0o755)
    return str(folder / "ft")


def test_which_ft_is_ours(tmp_path: Path) -> None:
    theirs = program(tmp_path / "theirs", "#!/usr/bin/env python3\nprint('FreeToken 0.2.1')\n")
    wrapper = program(tmp_path / "wrapper", f"#!{sys.executable}\nfrom freetoken.cli.main import run\n")
    link = tmp_path / "link" / "ft"
    link.parent.mkdir()
    link.symlink_to(Path(sys.executable).with_name("ft"))
    path = os.pathsep.join(str(Path(place).parent) for place in (theirs, wrapper, link))
    found = read_machine.programs(f"{path}{os.pathsep}{tmp_path}/none")
    assert [(p.path, p.ours) for p in found] == [(theirs, False), (wrapper, True), (str(link), True)]


@pytest.mark.parametrize(
    ("script", "problem"),
    [("exit 1", "exit code 1"), (None, "no Python"), ("echo '{}'", None), ("sleep 60", "no answer")],
)
def test_an_interrupted_installation(
    home: Home, script: str | None, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FT #78: an environment whose Python exits 1 makes all later tries fail."""
    monkeypatch.setattr(read_machine, "START_S", 1.0 if script == "sleep 60" else 20.0)
    assert read_machine.installed(home) is None
    python = home.root / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    found = read_machine.installed(home)
    assert found is not None
    assert (found.problem is None) if problem is None else (problem in str(found.problem))


def test_disk_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    free = read_machine.disk_free(Home(tmp_path / "a" / "b"))
    assert abs(free - shutil.disk_usage(tmp_path).free) < 1 << 30
