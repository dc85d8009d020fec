"""Starts tests.fakes.engine_process as the supervisor starts the real worker, and takes it away again."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from freetoken.core.events import GenerationEvent, Tokens
from freetoken.core.types import GenerateRequest, SamplingParams
from freetoken.wire import channel
from freetoken.wire.messages import Phase, Ready
from freetoken.wire.remote import LoadEvent, RemoteEngine
from freetoken.wire.rendezvous import Rendezvous

ROOT = Path(__file__).parents[2]
RESOLVED = {
    "device": "cpu",
    "weight_dtype": "float32",
    "page_size": 16,
    "num_pages": 256,
    "max_running_requests": 4,
    "max_prefill_tokens": 512,
    "max_seq_len": 4096,
    "max_queued": 64,
    "queue_deadline_s": 600.0,
    "threads": 1,
}
PLAN: dict[str, object] = {
    "schema": 1,
    "resolved": {name: {"value": value, "source": "test", "reason": ""} for name, value in RESOLVED.items()},
}


@dataclass
class EngineProcess:
    process: asyncio.subprocess.Process
    where: Rendezvous
    runtime: Path  # the rendezvous file
    folder: Path

    async def connect(self, timeout_s: float = 10.0) -> RemoteEngine:
        return await RemoteEngine.connect(self.where, timeout_s)

    def files(self, **wanted: object) -> dict[str, str]:
        """What the fake loads: see engine_process."""
        path = self.folder / "fake.json"
        path.write_text(json.dumps(wanted))
        return {"model": str(path)}

    async def loaded(self, **wanted: object) -> RemoteEngine:
        engine = await self.connect()
        async for event in engine.load(PLAN, self.files(**wanted)):
            assert isinstance(event, Phase | Ready), event
        assert engine.ready is not None
        return engine

    async def exit_code(self, timeout_s: float = 5.0) -> int:
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    async def errors(self) -> str:
        """stderr, after the end."""
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()


@asynccontextmanager
async def engine_process(folder: Path, orphan_grace_s: float = 60.0) -> AsyncIterator[EngineProcess]:
    where = Rendezvous.new(orphan_grace_s)
    runtime = folder / "engine.json"
    where.write(runtime)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.fakes.engine_process", "--runtime", str(runtime)),
        cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield EngineProcess(process, where, runtime, folder)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        channel.remove(where.socket)


def run(test: Callable[[], Awaitable[None]], timeout_s: float = 30.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(timeout_s):
            await test()

    asyncio.run(limited())


def request(name: str, prompt: list[int], most: int, **sampling: object) -> GenerateRequest:
    return GenerateRequest(name, tuple(prompt), SamplingParams(max_tokens=most, **sampling))  # type: ignore[arg-type]


async def collect(stream: AsyncIterator[GenerationEvent]) -> list[int]:
    """The token ids of a stream that must end well."""
    ids: list[int] = []
    last: GenerationEvent | None = None
    async for event in stream:
        last = event
        if isinstance(event, Tokens):
            ids += event.token_ids
    assert isinstance(last, Tokens) and last.finish is not None, last
    return ids


async def load_events(engine: RemoteEngine, files: dict[str, str]) -> list[LoadEvent]:
    return [event async for event in engine.load(PLAN, files)]
