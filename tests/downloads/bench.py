"""What the tests of downloads share: a repository in the fake hub, a fetcher and a table of downloads over it."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freetoken.daemon import store
from freetoken.daemon.downloads.choose import RepoFile
from freetoken.daemon.downloads.fetch import Fetcher, Limits, Source
from freetoken.daemon.downloads.hub import HuggingFace
from freetoken.daemon.downloads.jobs import Downloads, Options
from freetoken.daemon.downloads.patience import Patience
from freetoken.daemon.downloads.telling import Teller
from freetoken.daemon.downloads.web import AllowedHosts, Web
from freetoken.daemon.events import Hub
from freetoken.daemon.operations import Operations
from freetoken.daemon.shelf import Shelf
from tests.fakes.hub import Content, FakeHub, Repo

QUICK = Patience(attempts=4, first_s=0.01, longest_s=0.05, connect_s=5, stall_s=0.4, longest_retry_after_s=2)
SMALL = Limits(connections=4, files=3, part_bytes=256 << 10, chunk_bytes=64 << 10, journal_s=0.02)
WEIGHTS = "model.safetensors"


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def safetensors(size: int) -> bytes:
    """A safetensors file of one tensor of `size` bytes."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + noise(size)


def repository(weights: int = 2 << 20) -> Repo:
    """A model as the hub has it, with what a load does not need beside it."""
    return Repo(
        {
            "config.json": Content(b'{"model_type": "llama"}'),
            "tokenizer.json": Content(noise(300_000, 1)),
            "generation_config.json": Content(b""),
            "README.md": Content(b"# a model"),
            "pytorch_model.bin": Content(noise(1000, 2), lfs=True),
            WEIGHTS: Content(safetensors(weights), lfs=True),
        }
    )


def gguf_repository() -> Repo:
    names = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "big/m-BF16-00001-of-00002.gguf", "big/m-BF16-00002-of-00002.gguf")
    return Repo({name: Content(b"GGUF" + noise(5000 + at, at), lfs=True) for at, name in enumerate(names)})


@dataclass
class Counted:
    """A Report."""

    was_there: int = 0
    came: int = 0
    verified: int = 0

    def kept(self, count: int) -> None:
        self.was_there += count

    def arrived(self, count: int) -> None:
        self.came += count

    def hashed(self, count: int) -> None:
        self.verified += count


@dataclass
class Transfer:
    """One Fetcher over the fake hub's org/m, and what it said."""

    hub: FakeHub
    folder: Path
    patience: Patience = QUICK
    limits: Limits = SMALL
    report: Counted = field(default_factory=Counted)

    async def fetch(self, *names: str) -> dict[str, str]:
        repo = self.hub.repos["org/m"]
        async with Web(AllowedHosts(self.hub.url, [self.hub.cdn]), lambda: None, self.patience) as web:
            api = HuggingFace(web, self.hub.url)
            files = (await api.info("org/m", "main")).files
            wanted = [file for file in files if file.name in (names or repo.files)]
            fetcher = Fetcher(web, self.folder, self.patience, self.limits, self.report)
            return await fetcher.fetch([self._source(api, file) for file in wanted])

    def _source(self, api: HuggingFace, file: RepoFile) -> Source:
        commit = self.hub.repos["org/m"].commit
        return Source(api.url("org/m", commit, file.name), file, file.name, "org/m", commit)

    def run(self, *names: str) -> dict[str, str]:
        return asyncio.run(asyncio.wait_for(self.fetch(*names), 30))

    def right(self, name: str = WEIGHTS) -> bool:
        """Whether the file is there with the hub's content."""
        content = self.hub.repos["org/m"].files[name]
        path = self.folder / "files" / name
        return path.is_file() and path.read_bytes() == b"".join(content.read(0, content.size))


class Table:
    """A table of downloads over a state folder, with all its events."""

    def __init__(self, hub: FakeHub, home: Path, **options: Any) -> None:
        self.home = store.open_home(home)
        self.token: str | None = None
        self.events = Hub("e", dict)
        self.operations = Operations(self.home.operations, self.events)
        defaults: dict[str, Any] = {"endpoint": hub.url, "mirrors": (hub.cdn,), "patience": QUICK, "limits": SMALL}
        teller = Teller(self.events, self.operations)
        self.downloads = Downloads(self.home, teller, lambda: self.token, Options(**{**defaults, **options}))
        self.shelf = Shelf(self.home.models)
        self.heard: list[Any] = []

    async def until(self, id: str, *states: str) -> dict[str, Any]:
        """The download once it is in one of the states; AssertionError after a while."""
        async with asyncio.timeout(20):
            while (view := self.downloads.show(id))["state"] not in states:
                await asyncio.sleep(0.005)
        return view

    async def until_bytes(self, id: str, count: int) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while (view := self.downloads.show(id))["bytes_done"] < count:
                await asyncio.sleep(0.002)
        return view

    async def listen(self) -> None:
        async for event in self.events.listen(types=["download", "operation"]):
            self.heard.append(event)

    def told(self, prefix: str = "download.") -> list[str]:
        return [event.type for event in self.heard if event is not None and event.type.startswith(prefix)]

    @property
    def ids(self) -> list[str]:
        return [row.id for row in self.shelf.rows()]


@asynccontextmanager
async def opened(hub: FakeHub, home: Path, **options: Any) -> AsyncIterator[Table]:
    table = Table(hub, home, **options)
    listening = asyncio.create_task(table.listen())
    await asyncio.sleep(0)
    try:
        yield table
    finally:
        await table.downloads.close()
        listening.cancel()


def play(hub: FakeHub, home: Path, scenario: Callable[[Table], Awaitable[None]], **options: Any) -> None:
    """Runs `scenario` on a table of `home`, which ends as a daemon does."""

    async def main() -> None:
        async with opened(hub, home, **options) as table:
            await scenario(table)

    asyncio.run(asyncio.wait_for(main(), 60))
