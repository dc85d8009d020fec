"""A process that speaks the engine's side of the wire, written from the contract and not with our codec.

`python -m tests.fakes.worker --runtime FILE`. What it does is written in `fake.json` beside the weights of the model it
is told to load: see Script. No torch, no model: tokens are counted up from 1.

An action is `exit:N`, `kill:N` (a signal to itself), `hang` (the step never ends, it beats on), `stuck` (nothing more
is sent at all), `flood:N` (so many lines on stdout), `say:TEXT`; several are separated by ` then `.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

PROTO = 1


@dataclass
class Script:
    """fake.json. Times in seconds."""

    phases: tuple[tuple[str, int], ...] = (("import", 1), ("read_weights", 4), ("build_kv", 1), ("warmup", 1))
    step_s: float = 0.01  # for each unit of a phase
    then: str = "ready"  # ready | fail:CODE:detail | an action
    says: str = ""  # a line on stderr before `then`
    stubborn: bool = False  # deaf to shutdown and SIGTERM
    token_s: float = 0.01
    at_tokens: dict[int, str] = field(default_factory=dict)  # actions, at so many tokens in all
    ready_s: float = 0.0  # so long after ready ...
    ready_then: str = ""  # ... an action


class Worker:
    def __init__(self, runtime: Path) -> None:
        self.runtime = runtime
        self.facts = json.loads(runtime.read_text())
        self.script = Script()
        self.streams: dict[str, asyncio.Task[None]] = {}
        self.tokens = 0
        self.ended = asyncio.Event()
        self.writer: asyncio.StreamWriter | None = None
        self.latest: tuple[str, dict[str, Any]] | None = None  # phase or ready, for the next daemon
        self.step_began: float | None = None

    async def run(self) -> None:
        server = await asyncio.start_unix_server(self.connected, self.facts["socket"])
        process = psutil.Process()
        self.runtime.write_text(json.dumps({**self.facts, "pid": process.pid, "start_time": process.create_time()}))
        self.background = [asyncio.create_task(self.beat()), asyncio.create_task(self.wait_for_daemon(30.0))]
        await self.ended.wait()
        server.close()
        socket = Path(self.facts["socket"])
        socket.unlink(missing_ok=True)
        if socket.parent.name.startswith("freetoken-"):
            socket.parent.rmdir()
        os._exit(0)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await read(reader)
        if hello is None or hello["nonce"] != self.facts["nonce"] or self.writer is not None:
            writer.close()
            return
        self.writer = writer
        self.background[1].cancel()
        self.send("hello", proto=PROTO, nonce=self.facts["nonce"], instance_id=self.facts["instance_id"], build="fake")
        if self.latest is not None:
            self.send(self.latest[0], **self.latest[1])
        while (message := await read(reader)) is not None:
            self.handle(message)
        self.writer = None
        for stream in self.streams.values():
            stream.cancel()
        self.streams.clear()
        self.background[1] = asyncio.create_task(self.wait_for_daemon(self.facts["orphan_grace_s"]))

    async def wait_for_daemon(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.ended.set()

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
            self.script = msgspec.convert(json.loads(file.read_text()), Script, strict=False)
        if self.script.stubborn:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name, total in self.script.phases:
            for done in range(total + 1):
                self.latest = ("phase", {"name": name, "done": done, "total": total, "unit": "steps"})
                self.send("phase", **self.latest[1])
                await asyncio.sleep(self.script.step_s)
        if self.script.says:
            print(self.script.says, file=sys.stderr, flush=True)
        await self.finish_load(message["plan"])

    async def finish_load(self, plan: dict[str, Any]) -> None:
        what, _, rest = self.script.then.partition(":")
        if what == "ready":
            self.latest = ("ready", {"plan": plan, "measured": {"load_s": 0.1, "weights_bytes": 1000}})
            self.send("ready", **self.latest[1])
            self.stats()
            if self.script.ready_then:
                await asyncio.sleep(self.script.ready_s)
                self.act(self.script.ready_then)
        elif what == "fail":
            code, _, detail = rest.partition(":")
            self.send("failed", code=code, detail=detail, numbers={"wanted": 7})
        else:
            self.act(self.script.then)

    def act(self, actions: str) -> None:
        for action in actions.split(" then "):
            what, _, rest = action.partition(":")
            match what:
                case "exit":
                    os._exit(int(rest))
                case "kill":
                    os.kill(os.getpid(), int(rest))
                case "say":
                    print(rest, flush=True)
                case "flood":
                    print(*(f"flood {number}" for number in range(int(rest))), sep="\n", flush=True)
                case "stuck":
                    time.sleep(1000)
                case "hang":  # before ready there is no step: nothing goes on
                    self.step_began = time.monotonic()

    async def generate(self, message: dict[str, Any]) -> None:
        count = message["sampling"]["max_tokens"] or 1_000_000
        for index in range(count):
            await asyncio.sleep(self.script.token_s)
            while self.step_began is not None:
                await asyncio.sleep(1.0)
            finish = "length" if index + 1 == count else None
            self.send("tokens", id=message["id"], token_ids=[1 + index % 9], cached=0, finish=finish)
            self.tokens += 1
            if self.tokens in self.script.at_tokens:
                self.act(self.script.at_tokens[self.tokens])
        self.streams.pop(message["id"], None)

    async def beat(self) -> None:
        while True:
            age_s = 0.0 if self.step_began is None else time.monotonic() - self.step_began
            self.send("beat", step=self.tokens, step_age_ms=round(age_s * 1000))
            await asyncio.sleep(1.0)

    def stats(self) -> None:
        running = len(self.streams)
        pages = {"pages_total": 100, "pages_free": 100 - running, "pages_cached": 0}
        counts = {"prompt_tokens": 0, "output_tokens": self.tokens, "cached_tokens": 0, "rss_bytes": 5_000_000}
        rates = {"decode_tok_s": 0.0, "prefill_tok_s": 0.0}
        routed = {"layers_routed": 2, "experts": 4, "expert_tokens": [[1, 2, 3, 4], [4, 3, 2, 1]]}
        self.send("stats", running=running, queued=0, **pages, **counts, **rates, **routed)

    def send(self, type: str, **fields: Any) -> None:
        if self.writer is not None and not self.writer.is_closing():
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
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    asyncio.run(Worker(parser.parse_args().runtime).run())
