"""A supervisor on its own, with real processes (tests.fakes.worker) and everything that it told."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil

from freetoken.core.types import GenerateRequest, SamplingParams
from freetoken.daemon import store
from freetoken.daemon.events import Event, Hub
from freetoken.daemon.operations import Operations
from freetoken.daemon.shelf import Shelf
from freetoken.daemon.state import EngineStatus, Operation, OperationState
from freetoken.daemon.supervisor.actor import Desk, Supervisor
from freetoken.daemon.supervisor.host import Host
from freetoken.daemon.supervisor.prepare import Parts
from freetoken.settings.load import load
from tests.fakes.folder import tiny_folder

WORKER = (sys.executable, str(Path(__file__).with_name("worker.py")))


class NoText:
    """In the place of a tokenizer, which takes half a second to read; tests/daemon/test_daemon.py has the real one."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def _no_text(source: object) -> Any:
    return NoText()


def fake_parts(worker: tuple[str, ...] = WORKER, **others: Any) -> Parts:
    return Parts(worker, text=_no_text, **others)


class Bench:
    """A supervisor on its own, with everything it told."""

    def __init__(self, folder: Path, parts: Parts | None = None, **settings: object) -> None:
        self.folder = folder
        self.home = store.open_home(folder / "home")
        self.told: list[Event] = []
        self.hub = Hub("e", dict)
        self.operations = Operations(self.home.operations, self.hub)
        self.shelf = Shelf(self.home.models)
        self.settings = load({"home": str(self.home.root), "stop_deadline_s": 2, **settings}, {}).settings
        desk = Desk(self.hub, self.operations, self.shelf)
        self.supervisor = Supervisor(self.home, self.settings, desk, parts or fake_parts(), Random(1))
        self.host = Host(self.supervisor, self.shelf, self.operations, self.settings)

    def model(self, name: str = "good", **fake: Any) -> str:
        return str(tiny_folder(self.folder / name, fake))

    async def load(self, model: str, **options: object) -> Operation:
        operation = self.supervisor.load(model, options)
        assert operation is not None
        return await self.operations.wait(operation.id, 20)

    async def ready(self, model: str, **options: object) -> None:
        done = await self.load(model, **options)
        assert done.state is OperationState.SUCCEEDED, done.error

    async def unload(self) -> Operation:
        operation = self.supervisor.unload(drain_s=1.0)
        assert operation is not None
        return await self.operations.wait(operation.id, 20)

    async def happened(self, type: str, count: int = 1, within_s: float = 10.0) -> Event:
        """The `count`-th event of the type, as soon as it was told."""
        deadline = time.monotonic() + within_s
        while len(found := [event for event in self.told if event.type == type]) < count:
            assert time.monotonic() < deadline, (type, self.types(), self.supervisor.state)
            await asyncio.sleep(0.005)
        return found[count - 1]

    async def until(self, status: EngineStatus, within_s: float = 5.0) -> None:
        deadline = time.monotonic() + within_s
        while self.supervisor.state.state is not status:
            assert time.monotonic() < deadline, self.supervisor.state
            await asyncio.sleep(0.005)

    def types(self, prefix: str = "") -> list[str]:
        return [event.type for event in self.told if event.type.startswith(prefix)]

    def states(self) -> list[str]:
        return [event.data["state"] for event in self.told if event.type == "engine.state_changed"]


def run(
    tmp_path: Path, scenario: Callable[[Bench], Awaitable[None]], parts: Parts | None = None, **settings: object
) -> None:
    """The scenario, and whether it left a process."""

    async def main() -> None:
        bench = Bench(tmp_path, parts, **settings)

        async def note() -> None:
            async for event in bench.hub.listen():
                if event is not None:
                    bench.told.append(event)

        noting = asyncio.create_task(note())
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(scenario(bench), 40)
        finally:
            await bench.supervisor.close()
            bench.hub.close()
            await noting
        assert [process for process in psutil.Process().children() if _is_worker(process)] == []

    asyncio.run(main())


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "worker.py" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie: it has ended
        return False


def request(id: str = "r1", max_tokens: int | None = None) -> GenerateRequest:
    return GenerateRequest(id, (5, 6), SamplingParams(max_tokens=max_tokens))
