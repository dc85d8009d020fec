"""From what a dead process leaves to a sentence that helps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freetoken.core.errors import EngineDied, EngineStartFailed, OutOfMemory
from freetoken.core.units import Bytes
from freetoken.daemon.supervisor import logs
from freetoken.daemon.supervisor.autopsy import Death, GpuLost, explain
from freetoken.daemon.supervisor.logs import EngineLog, clean

GIB = 1 << 30
KILLED = Death(
    exit_code=-9,
    signal="SIGKILL",
    last_lines=("loading",),
    loading=True,
    kernel_oom_kills=0,
    least_free=Bytes(8 * GIB),
    total=Bytes(16 * GIB),
)


@pytest.mark.parametrize(
    ("change", "oom"),
    [
        ({}, False),
        ({"kernel_oom_kills": 1}, True),
        ({"least_free": Bytes(GIB // 2)}, True),
        ({"least_free": Bytes(GIB // 2), "signal": "SIGSEGV", "exit_code": -11}, False),
        ({"kernel_oom_kills": 3, "signal": None, "exit_code": 1}, False),
    ],
)
def test_lack_of_memory_is_told_from_other_deaths(change: dict[str, object], oom: bool) -> None:
    death = replace(KILLED, **change)
    error = explain(death)
    assert death.oom_killed is oom and error.numbers["oom_killed"] == int(oom)
    assert ("memory ran out" in error.detail) is oom
    assert any("--num-tokens" in fix for fix in error.fixes) is oom


def test_the_kernels_kill_during_a_load_says_how_little_was_left() -> None:
    error = explain(replace(KILLED, least_free=Bytes(120 << 20)))
    assert isinstance(error, EngineDied) and error.numbers["signal"] == "SIGKILL"
    assert "while it loaded the model" in error.detail and "120.00 MiB of 16.00 GiB were free" in error.detail


def test_an_exit_quotes_the_last_line_that_says_something() -> None:
    lines = ("Traceback (most recent call last):", "FileNotFoundError: tokenizer.json", "  ", "")
    error = explain(replace(KILLED, exit_code=1, signal=None, last_lines=lines))
    assert isinstance(error, EngineStartFailed) and error.detail.endswith("FileNotFoundError: tokenizer.json.")
    silent = explain(replace(KILLED, exit_code=1, signal=None, last_lines=(), loading=False))
    assert type(silent) is EngineDied and silent.detail == "The engine process ended by itself (exit code 1)."


def test_one_that_had_to_be_killed_is_said_to_be_silent() -> None:
    silent = explain(replace(KILLED, hung="no longer answered"))
    assert silent.detail == "The engine process no longer answered while it loaded the model and was ended."
    assert type(silent) is EngineDied


def test_one_of_an_earlier_daemon_has_no_exit_code_and_is_believed_to_be_out_of_memory_only_by_the_kernels_count() -> (
    None
):
    unknown = replace(KILLED, exit_code=None, signal=None, loading=False)
    assert "exit code is not known; its last words: loading" in explain(unknown).detail
    assert "exit_code" not in explain(unknown).numbers
    low = replace(unknown, least_free=Bytes(GIB // 2))
    assert not low.oom_killed and replace(low, kernel_oom_kills=1).oom_killed


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        ("RuntimeError: CUDA error: an illegal memory access was encountered", EngineDied, "illegal memory access"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", OutOfMemory, "Tried to allocate"),
        ("RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected", GpuLost, "lost its GPU"),
        ("Unable to determine the device handle: GPU is lost.  Reboot the system", GpuLost, "GPU is lost"),
        ("NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus.", GpuLost, "fallen off the bus"),
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", GpuLost, "busy or unavailable"),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", GpuLost, "lost its GPU"),
    ],
)
def test_what_cuda_says_names_the_cause(line: str, kind: type[EngineDied], said: str) -> None:
    lines = ("loading 79 shards", line, "terminate called")
    error = explain(replace(KILLED, exit_code=4, signal=None, loading=False, last_lines=lines))
    assert type(error) is kind and said in error.detail


def test_a_gpu_is_not_lost_by_a_line_that_merely_has_its_numbers() -> None:
    assert not replace(KILLED, last_lines=("read 79 of 119 tensors", "Xid: none", "CUDA 12.8")).gpu_lost


def test_lines_are_harmless_in_a_terminal_and_do_not_name_the_user() -> None:
    assert clean("\x1b[31mred\x07 ok\tyes") == "\\x1b[31mred\\x07 ok\tyes"
    assert clean(f"file {Path.home()}/models/x") == "file ~/models/x"
    assert len(clean("x" * 10**6)) == logs.LINE


def test_the_log_keeps_the_newest_lines_and_a_bounded_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "FILE", 1000)
    log = EngineLog(tmp_path / "engine.log")
    for number in range(logs.KEPT + 10):
        log.add(f"line {number}\n".encode() + b"\xff")
    assert log.last(2) == [f"line {logs.KEPT + n}\\x0a\ufffd" for n in (8, 9)]
    log.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) == 2 and max(sizes) < 1100
    log = EngineLog(tmp_path / "engine.log")
    assert log.last(5) == []
    log.close()
