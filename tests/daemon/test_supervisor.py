"""The supervisor with real processes: tests.fakes.worker speaks the wire and does what fake.json tells it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from freetoken.core.errors import (
    DeadlineExceeded,
    EngineDied,
    LifecycleBusy,
    ModelNotFound,
    ModelNotLoaded,
    SettingError,
)
from freetoken.core.events import Tokens
from freetoken.daemon import store
from freetoken.daemon.state import EngineStatus, OperationState
from freetoken.daemon.supervisor import child
from freetoken.daemon.supervisor.states import MOVES
from freetoken.daemon.supervisor.view import engine_view
from tests.fakes.bench import Bench, fake_parts, request, run
from tests.fakes.folder import tiny_folder


def test_a_load_goes_through_every_state_and_answers(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ready(bench.model(), max_running_requests=2)
        loaded = await bench.host.resolve("local/good")
        assert loaded.context_tokens == 4096 and loaded.eos_ids == (2,)
        events = [event async for event in loaded.backend.generate(request(max_tokens=3))]
        assert [id for event in events if isinstance(event, Tokens) for id in event.token_ids] == [1, 2, 3]
        view = engine_view(bench.supervisor)
        assert (view["state"], view["model"], view["options"]) == ("ready", "local/good", {"max_running_requests": 2})
        assert view["experts"] == {"layers": 2, "experts": 4, "tokens": ((1, 2, 3, 4), (4, 3, 2, 1)), "hits": {}}
        assert view["memory"]["rss_bytes"] == 5_000_000 and view["plan"]["schema"] == 1
        assert view["stats"]["pages_total"] == 100
        pid = view["pid"]
        assert [(m.id, m.loaded) for m in bench.host.listing()] == [("local/good", True)]
        assert (await bench.unload()).state is OperationState.SUCCEEDED
        assert not psutil.pid_exists(pid) and not bench.home.engine_record.exists()
        assert [(m.id, m.loaded) for m in bench.host.listing()] == [("local/good", False)]
        assert bench.supervisor.unload() is None

    run(tmp_path, scenario)


def test_what_watchers_are_told_of_a_load(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ready(bench.model())
        await bench.unload()
        await asyncio.sleep(0.01)
        assert bench.states() == ["starting", "loading", "warming", "ready", "draining", "stopping", "stopped"]
        phases = [event.data["phase"] for event in bench.told if event.type == "load.phase"]
        assert phases == ["verify", "plan", "spawn", "import", "read_weights", "build_kv", "warmup"]
        assert bench.types("load.completed") and bench.types("plan.created")
        assert {event.corr for event in bench.told if event.type.startswith("load.")} == {
            next(event.subject for event in bench.told if event.type == "operation.updated")
        }
        json.dumps([event.data for event in bench.told])

    run(tmp_path, scenario)


def test_the_same_wish_is_not_done_twice_and_another_one_waits_its_turn(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        good, other = bench.model(), bench.model("other")
        first = bench.supervisor.load(good, {})
        assert first is not None and bench.supervisor.load(good, {}) == bench.operations.get(first.id)
        with pytest.raises(LifecycleBusy) as caught:
            bench.supervisor.load(other, {})
        assert first.id in caught.value.detail and caught.value.fixes
        with pytest.raises(LifecycleBusy):
            bench.supervisor.unload()
        await bench.operations.wait(first.id, 10)
        assert bench.supervisor.load(good, {}) is None
        pid = bench.supervisor.state.pid
        await bench.ready(other)
        assert bench.supervisor.state.model == "local/other" and not psutil.pid_exists(pid or 0)
        await bench.ready(other, max_queued=3)

    run(tmp_path, scenario)


def test_a_bad_wish_loses_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ready(bench.model())
        pid = bench.supervisor.state.pid
        broken = Path(bench.model("broken"))
        (broken / "config.json").unlink()
        failed = await bench.load(str(broken))
        assert failed.state is OperationState.FAILED and (failed.error or {})["code"] == "CONFIG_MISSING"
        too_large = await bench.load(bench.model("large"), num_tokens=10**12)
        assert (too_large.error or {})["code"] in ("KV_TOO_LARGE", "DOES_NOT_FIT", "HOST_RAM_TOO_SMALL")
        with pytest.raises(ModelNotFound):
            bench.supervisor.load(str(tmp_path / "nowhere"), {})
        with pytest.raises(SettingError):
            bench.supervisor.load("local/good", {"worker": "/bin/sh"})
        assert (bench.supervisor.state.state, bench.supervisor.state.pid) == (EngineStatus.READY, pid)
        assert (await bench.host.resolve("local/good")).id == "local/good"
        assert [model.id for model in bench.host.listing()] == ["local/good", "local/large"]

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        ("fail:TENSOR_MISMATCH:q_proj is missing", "TENSOR_MISMATCH", "q_proj is missing"),
        ("exit:3", "ENGINE_START_FAILED", "exit code 3); its last words: RuntimeError: no kernel"),
        ("kill:9", "ENGINE_DIED", "SIGKILL"),
        ("kill:11", "ENGINE_DIED", "crashed while it loaded the model (SIGSEGV)"),
    ],
)
def test_a_load_that_fails_says_why_and_the_next_one_works(tmp_path: Path, then: str, code: str, said: str) -> None:
    async def scenario(bench: Bench) -> None:
        failed = await bench.load(bench.model("bad", then=then, says="RuntimeError: no kernel"))
        assert failed.state is OperationState.FAILED and failed.error is not None
        assert failed.error["code"] == code and said in failed.error["detail"]
        state = bench.supervisor.state
        assert state.state is EngineStatus.FAILED and state.failure == failed.error and state.pid is None
        with pytest.raises(ModelNotLoaded, match="is not loaded:") as caught:
            await bench.host.resolve("local/bad")
        assert caught.value.fixes == ("ft load local/bad",)
        await bench.ready(bench.model())
        assert bench.supervisor.state.failure is None

    run(tmp_path, scenario)


def test_a_program_that_does_not_start_says_why(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        failed = await bench.load(bench.model())
        assert failed.error is not None and failed.error["code"] == "ENGINE_START_FAILED"
        assert "ModuleNotFoundError: No module named 'torch_is_not_here'" in failed.error["detail"]

    run(tmp_path, scenario, fake_parts((sys.executable, "-c", "import torch_is_not_here")))
    run(tmp_path / "2", _cannot_be_started, fake_parts((str(tmp_path / "no-such-program"),)))


async def _cannot_be_started(bench: Bench) -> None:
    failed = await bench.load(bench.model())
    assert "could not be started: No such file" in (failed.error or {})["detail"]


def test_kill_9_in_mid_stream_ends_the_stream_within_a_second_and_a_new_load_works(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ready(bench.model())
        loaded = await bench.host.resolve("local/good")
        stream = loaded.backend.generate(request())
        await anext(stream)
        os.kill(bench.supervisor.state.pid or 0, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(EngineDied):
            async for _ in stream:
                pass
        assert time.monotonic() - killed < 1.0
        await bench.until(EngineStatus.FAILED)
        await asyncio.sleep(0.01)
        (crash,) = [event for event in bench.told if event.type == "engine.crashed"]
        assert (crash.data["signal"], crash.data["exit"]) == ("SIGKILL", -9)
        assert "SIGKILL" in (bench.supervisor.state.failure or {})["detail"]
        await bench.ready(bench.model())
        assert [e async for e in (await bench.host.resolve("local/good")).backend.generate(request("r2", 2))]

    run(tmp_path, scenario)


def test_a_load_asked_for_at_the_moment_of_a_death_finds_a_settled_state(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ready(bench.model())
        running = bench.supervisor.running
        assert running is not None
        os.kill(running.process.pid, signal.SIGKILL)
        await running.remote.wait_gone()
        await asyncio.sleep(0)
        await bench.ready(bench.model())

    run(tmp_path, scenario)


def test_a_stall_ends_a_load_and_steady_progress_does_not(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ready(bench.model("steady", phases=[["read_weights", 16]], step_s=0.1))
        stalled = await bench.load(bench.model("stuck", phases=[["read_weights", 1]], then="hang"))
        assert stalled.error is not None and stalled.error["code"] == "LOAD_TIMEOUT"
        assert "stood still for 1 s in the phase read_weights" in stalled.error["detail"]
        assert bench.supervisor.state.state is EngineStatus.FAILED

    run(tmp_path, scenario, load_stall_s=1)


def test_a_cancelled_load_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        operation = bench.supervisor.load(bench.model(phases=[["read_weights", 1000]]), {})
        assert operation is not None
        await bench.until(EngineStatus.LOADING)
        await asyncio.sleep(0.1)
        pid = bench.supervisor.state.pid
        bench.operations.cancel(operation.id)
        bench.operations.cancel(operation.id)
        assert (await bench.operations.wait(operation.id, 10)).state is OperationState.CANCELLED
        assert bench.supervisor.state.state is EngineStatus.STOPPED and not psutil.pid_exists(pid or 0)
        await bench.ready(bench.model("good2"))

    run(tmp_path, scenario)


def test_an_engine_that_is_deaf_is_killed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "TERM_S", 0.2)

    async def scenario(bench: Bench) -> None:
        await bench.ready(bench.model(stubborn=True))
        pid = bench.supervisor.state.pid or 0
        began = time.monotonic()
        assert (await bench.unload()).state is OperationState.SUCCEEDED
        assert time.monotonic() - began < 4 and not psutil.pid_exists(pid)

    run(tmp_path, scenario, stop_deadline_s=0.2)


def test_requests_wait_for_a_model_that_is_loading(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        bench.supervisor.load(bench.model(), {})
        assert (await bench.host.resolve("local/good")).id == "local/good"
        with pytest.raises(ModelNotFound, match="there is local/good"):
            await bench.host.resolve("gpt-4")
        await bench.unload()
        bench.supervisor.load(bench.model("slow", phases=[["read_weights", 1000]]), {})
        with pytest.raises(ModelNotFound):
            await bench.host.resolve("local/slow-not")
        with pytest.raises(DeadlineExceeded):
            await bench.host.resolve("local/slow")

    run(tmp_path, scenario, load_deadline_s=3)


def test_the_secret_is_in_no_argument_and_no_environment(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.ready(bench.model())
        nonce = json.loads(bench.home.engine_record.read_text())["nonce"]
        assert bench.home.engine_record.stat().st_mode & 0o077 == 0
        process = psutil.Process(bench.supervisor.state.pid)
        assert nonce not in " ".join(process.cmdline())
        assert nonce not in process.environ().values()

    run(tmp_path, scenario)


def test_ids_are_found_on_the_shelf_and_only_complete_models_count(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        for name, state in (("demo/r1", "complete"), ("org--half/r1", "partial")):
            folder = tiny_folder(bench.home.models / name)
            record = {"id": name.split("/")[0].replace("--", "/"), "source": "x", "files": {}, "state": state}
            store.write_json(folder / "model.json", record)
        store.write_json(tiny_folder(bench.home.models / "x" / "r") / "model.json", {"id": "../x", "state": "complete"})
        assert [row.id for row in bench.shelf.rows()] == ["demo"]
        await bench.ready("demo")
        with pytest.raises(ModelNotFound, match="there is demo"):
            bench.supervisor.load("org/half", {})

    run(tmp_path, scenario)


def test_every_state_can_be_left_and_only_by_moves_of_the_table() -> None:
    assert set(MOVES) == set(EngineStatus) and all(MOVES.values())
    reachable = {EngineStatus.STOPPED}
    for _ in EngineStatus:
        reachable |= {new for old in reachable for new in MOVES[old]}
    assert reachable == set(EngineStatus)
    assert EngineStatus.READY not in MOVES[EngineStatus.STOPPED] | MOVES[EngineStatus.FAILED]
