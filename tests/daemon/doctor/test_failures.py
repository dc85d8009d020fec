"""What a failure leaves on disk for the doctor, with real engine processes that die."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from freetoken.daemon import failures, store
from freetoken.daemon.doctor import read_home
from freetoken.daemon.state import EngineState, EngineStatus
from tests.fakes.bench import Bench, run


def test_a_failed_load_and_a_later_good_one(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        assert failures.last(bench.home) is None
        await bench.load(bench.model("bad", then="exit:3", says="RuntimeError: no kernel"))
        past = read_home.past(bench.home)
        assert past.failure is not None and past.loaded_since is None
        assert past.failure.model == "local/bad"
        assert "RuntimeError: no kernel" in past.failure.problem["detail"]
        assert past.failure.problem["fixes"]
        await bench.ready(bench.model())
        past = read_home.past(bench.home)
        assert past.failure is not None and past.loaded_since is not None
        assert past.loaded_since > past.failure.time

    run(tmp_path, scenario)


def test_a_crash_is_kept_too(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ready(bench.model())
        os.kill(bench.supervisor.state.pid or 0, signal.SIGSEGV)
        await bench.happened("engine.crashed")
        kept = failures.last(bench.home)
        assert kept is not None and "SIGSEGV" in kept.problem["detail"]

    run(tmp_path, scenario)


def test_a_file_of_another_version_is_no_failure(tmp_path: Path) -> None:
    home = store.open_home(tmp_path / "home")
    (home.logs / "last-failure.json").write_text('["something else"]')
    assert failures.last(home) is None


def test_a_full_disk_does_not_end_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = store.open_home(tmp_path / "home")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_json", full)
    failures.remember(home, EngineState(EngineStatus.FAILED, "2026-01-01T00:00:00.000Z", "demo", failure={}))
    assert failures.last(home) is None
