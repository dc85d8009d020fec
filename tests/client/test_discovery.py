"""Which record of a daemon is believed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from freetoken.client.discovery import find, process_is
from freetoken.core.errors import DaemonError, DaemonNotReachable
from tests.fakes.control import TOKEN, write_record


def test_a_running_process_is_found(tmp_path: Path) -> None:
    write_record(tmp_path, "http://127.0.0.1:1919")
    address = find(tmp_path)
    assert (address.url, address.token) == ("http://127.0.0.1:1919", TOKEN)
    assert address.running()
    assert TOKEN not in repr(address)


def test_no_record(tmp_path: Path) -> None:
    with pytest.raises(DaemonNotReachable) as caught:
        find(tmp_path)
    assert caught.value.exit_code == 3
    assert caught.value.fixes == ("ft daemon start",)


def test_a_pid_that_another_process_has_now_is_not_believed(tmp_path: Path) -> None:
    stranger = psutil.Process()
    write_record(tmp_path, "http://127.0.0.1:1", start_time=stranger.create_time() - 60)
    with pytest.raises(DaemonNotReachable, match=f"pid {stranger.pid}"):
        find(tmp_path)


def test_a_dead_or_zombie_process_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    began = psutil.Process(child.pid).create_time()
    assert process_is(child.pid, began)
    child.kill()
    deadline = time.monotonic() + 5
    while process_is(child.pid, began) and time.monotonic() < deadline:  # not waited for: a zombie
        time.sleep(0.01)
    assert not process_is(child.pid, began)
    child.wait()
    assert not process_is(child.pid, began)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"url": 1}'])
def test_a_damaged_record(tmp_path: Path, content: str) -> None:
    write_record(tmp_path, "http://127.0.0.1:1")
    (tmp_path / "runtime" / "daemon.json").write_text(content)
    with pytest.raises(DaemonNotReachable, match=r"daemon\.json cannot be read"):
        find(tmp_path)


def test_a_missing_token_is_an_error_of_its_own(tmp_path: Path) -> None:
    write_record(tmp_path, "http://127.0.0.1:1")
    (tmp_path / "token").unlink()
    with pytest.raises(DaemonError, match="token"):
        find(tmp_path)
