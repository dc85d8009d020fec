"""A process that speaks the engine's side of the wire, written from the contract and not with our codec.

`python -m tests.fakes.worker --runtime FILE`. What it does is written in `fake.json` beside the weights of the model it
is told to load: see Script. No torch, no model: tokens are counted up from 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

PROTO = 1


@dataclass
class Script:
    """fake.json. Times in seconds."""

    phases: tuple[tuple[str, int], ...] = (("import", 1), ("read_weights", 4), ("build_kv", 1), ("warmup", 1))
    step_s: float = 0.01  # for each unit of a phase
    then: str = "ready"  # ready | fail:CODE:detail | exit:N | kill:N | hang
    says: str = ""  # a line on stderr before `then`
    stubborn: bool = False  # deaf to shutdown and SIGTERM
    token_s: float = 0.01
    die_after_tokens: int = 0  # SIGKILL itself after that many tokens in all


class Worker:
    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self.facts = json.loads(runtime.read_text())
        self.script = Script()
        self.streams: dict[str, asyncio.Task[None]] = {}
        self.tokens = 0
        self.ended = asyncio.Event()

    async def run(self) -> None:
        server = await asyncio.start_unix_server(self.connected, self.facts["socket"])
        self.runtime.write_text(json.dumps({**self.facts, "pid": os.getpid(), "start_time": time.time()}))
        await self.ended.wait()
        server.close()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        hello = await read(reader)
        if hello is None or hello["nonce"] != self.facts["nonce"]:
            writer.close()
            return
        self.send("hello", proto=PROTO, nonce=self.facts["nonce"], instance_id=self.facts["instance_id"], build="fake")
        beating = asyncio.create_task(self.beat())
        while (message := await read(reader)) is not None:
            self.handle(message)
        beating.cancel()
        self.ended.set()  # the orphan grace is 0 here

    def handle(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "load":
                self.loading = asyncio.create_task(self.load(message))
            case "submit":
                self.streams[message["id"]] = asyncio.create_task(self.generate(message))
            case "cancel":
                if (stream := self.streams.pop(message["id"], None)) is not None:
                    stream.cancel()
            case "status":
                self.stats()
            case "shutdown" if not self.script.stubborn:
                self.ended.set()

    async def load(self, message: dict[str, Any]) -> None:
        file = Path(message["files"]["model"]) / "fake.json"
        if file.exists():
            self.script = msgspec.convert(json.loads(file.read_text()), Script)
        if self.script.stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name, total in self.script.phases:
            for done in range(total + 1):
                self.send("phase", name=name, done=done, total=total, unit="steps")
                await asyncio.sleep(self.script.step_s)
        if self.script.says:
            print(self.script.says, file=sys.stderr, flush=True)
        self.finish_load(message["plan"])

    def finish_load(self, plan: dict[str, Any]) -> None:
        what, _, rest = self.script.then.partition(":")
        if what == "ready":
            self.send("ready", plan=plan, measured={"load_s": 0.1, "weights_bytes": 1000})
            self.stats()
        elif what == "fail":
            code, _, detail = rest.partition(":")
            self.send("failed", code=code, detail=detail, numbers={"wanted": 7})
        elif what == "exit":
            os._exit(int(rest))
        elif what == "kill":
            os.kill(os.getpid(), int(rest))

    async def generate(self, message: dict[str, Any]) -> None:
        count = message["sampling"]["max_tokens"] or 1_000_000
        for index in range(count):
            await asyncio.sleep(self.script.token_s)
            finish = "length" if index + 1 == count else None
            self.send("tokens", id=message["id"], token_ids=[1 + index % 9], cached=0, finish=finish)
            self.tokens += 1
            if self.tokens == self.script.die_after_tokens:
                os.kill(os.getpid(), signal.SIGKILL)
        self.streams.pop(message["id"], None)

    async def beat(self) -> None:
        while True:
            self.send("beat", step=self.tokens, step_age_ms=0)
            await asyncio.sleep(1.0)

    def stats(self) -> None:
        running = len(self.streams)
        pages = {"pages_total": 100, "pages_free": 100 - running, "pages_cached": 0}
        counts = {"prompt_tokens": 0, "output_tokens": self.tokens, "cached_tokens": 0, "rss_bytes": 5_000_000}
        rates = {"decode_tok_s": 0.0, "prefill_tok_s": 0.0}
        routed = {"layers_routed": 2, "experts": 4, "expert_tokens": [[1, 2, 3, 4], [4, 3, 2, 1]]}
        self.send("stats", running=running, queued=0, **pages, **counts, **rates, **routed)

    def send(self, type: str, **fields: Any) -> None:
        payload = msgspec.msgpack.encode({"type": type, **{k: v for k, v in fields.items() if v is not None}})
        self.writer.write(len(payload).to_bytes(4, "big") + payload)


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        size = int.from_bytes(await reader.readexactly(4), "big")
        message: dict[str, Any] = msgspec.msgpack.decode(await reader.readexactly(size))
        return message
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime", type=Path, required=True)
    asyncio.run(Worker(parser.parse_args().runtime).run())
