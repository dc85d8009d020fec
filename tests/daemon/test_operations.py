"""Operations: published, awaited, cancelled, remembered over a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from freetoken.core.errors import OperationNotFound
from freetoken.daemon.events import Hub
from freetoken.daemon.operations import KEPT, Operations
from freetoken.daemon.state import OperationState, Progress


def make(tmp_path: Path) -> tuple[Operations, Hub]:
    hub = Hub("e", dict)
    return Operations(tmp_path / "operations.json", hub), hub


def test_a_wait_ends_with_the_operation_or_with_its_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        operations, _ = make(tmp_path)
        id = operations.begin("load", "demo", lambda: None).id
        assert (await operations.wait(id, 0.01)).state is OperationState.RUNNING
        waiting = asyncio.create_task(operations.wait(id, 5))
        await asyncio.sleep(0)
        operations.finish(id, OperationState.FAILED, {"code": "X"})
        done = await asyncio.wait_for(waiting, 1)
        assert done.state is OperationState.FAILED and done.error == {"code": "X"}

    asyncio.run(scenario())


def test_progress_gives_a_time_left_from_its_own_pace(tmp_path: Path) -> None:
    async def scenario() -> None:
        operations, _ = make(tmp_path)
        id = operations.begin("load", "demo", lambda: None).id
        operations.advance(id, "read_weights", Progress(0, 100, "B"))
        assert operations.get(id).eta_ms is None
        await asyncio.sleep(0.05)
        operations.advance(id, "read_weights", Progress(50, 100, "B"))
        eta_ms = operations.get(id).eta_ms
        assert eta_ms is not None and 40 <= eta_ms <= 500
        operations.advance(id, "warmup")
        assert operations.get(id).eta_ms is None

    asyncio.run(scenario())


def test_a_restart_remembers_what_ended_and_calls_the_rest_interrupted(tmp_path: Path) -> None:
    async def scenario() -> None:
        operations, _ = make(tmp_path)
        ended = operations.begin("load", "demo", lambda: None).id
        operations.finish(ended, OperationState.SUCCEEDED)
        running = operations.begin("unload", "demo", lambda: None).id
        again, _ = make(tmp_path)
        assert again.get(ended).state is OperationState.SUCCEEDED
        assert again.get(running).state is OperationState.INTERRUPTED

    asyncio.run(scenario())


def test_a_file_of_another_version_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "operations.json").write_text('[{"id": 7}]')
    operations, _ = make(tmp_path)
    assert operations.recent() == []


def test_cancel_reaches_the_work_once_it_runs_and_never_after(tmp_path: Path) -> None:
    async def scenario() -> None:
        operations, _ = make(tmp_path)
        asked: list[str] = []
        id = operations.begin("load", "demo", lambda: asked.append("cancel")).id
        operations.cancel(id)
        operations.finish(id, OperationState.CANCELLED)
        operations.cancel(id)
        assert asked == ["cancel"]
        with pytest.raises(OperationNotFound):
            operations.cancel("op_x")

    asyncio.run(scenario())


def test_the_table_is_bounded_and_never_forgets_what_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        operations, _ = make(tmp_path)
        running = operations.begin("load", "demo", lambda: None).id
        for _ in range(KEPT + 5):
            operations.finish(operations.begin("load", "x", lambda: None).id, OperationState.SUCCEEDED)
        assert len(operations.recent(1000)) == KEPT + 1
        assert operations.get(running).state is OperationState.RUNNING

    asyncio.run(scenario())
