"""What the daemon costs idle, what it answers under load, and how late an event is. Prints figures, judges nothing.

    daemon_load.py [--idle-s 60] [--status-s 10] [--events-s 15]

The daemon is the real one, its engine tests.fakes.clock_worker. Idle: RSS and CPU time of the process while nobody asks
anything. Status: GET /engine on 16 kept connections, each one request after the other. Events: 16 streams of 50 tok/s
over /v1/chat/completions while the engine sends its clock 50 times a second; late is from there, over the wire and the
hub, to the message on a WebSocket. Clients run in a process of their own; all share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.fakes.folder import tiny_folder  # noqa: E402
from tests.fakes.running import Daemon, running  # noqa: E402

CONNECTIONS, STREAMS = 16, 16
TOKEN_S = 1 / 50


def idle(daemon: Daemon, seconds: float) -> dict[str, float]:
    daemon.ask("GET", "/api/v1/engine")
    process = psutil.Process(daemon.process.pid)
    time.sleep(3)
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    used = sum(process.cpu_times()[:2]) - before
    return {"rss_mib": process.memory_info().rss / 2**20, "cpu_percent": 100 * used / seconds}


# ── clients: in another process ─────────────────────────────────────────────────────────────────────────────────────
async def status(port: int, token: str, seconds: float) -> dict[str, float]:
    """Plain sockets: the client must cost little."""
    request = f"GET /api/v1/engine HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {token}\r\n\r\n".encode()
    late: list[float] = []

    async def one(until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < until:
            began = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            late.append(time.perf_counter() - began)
        writer.close()

    until = time.perf_counter() + seconds
    await asyncio.gather(*(one(until) for _ in range(CONNECTIONS)))
    return {"requests_s": len(late) / seconds, **milliseconds(late)}


async def events(port: int, token: str, seconds: float) -> dict[str, float]:
    from websockets.asyncio.client import connect

    late: list[float] = []
    tokens = [0]

    async def chat() -> None:
        body = json.dumps({"model": "local/bench", "messages": [{"role": "user", "content": "hello"}], "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n{head}{body}".encode())
        while line := await reader.readline():
            tokens[0] += line.startswith(b"data: ")

    async def listen() -> None:
        headers = {"authorization": f"Bearer {token}"}
        url = f"ws://127.0.0.1:{port}/api/v1/events/ws?types=log.line"
        async with connect(url, additional_headers=headers, proxy=None, compression=None) as socket:
            async for message in socket:
                now = time.time()
                event = json.loads(message)
                if event["type"] == "log.line" and event["data"]["line"].startswith("clock "):
                    late.append(now - float(event["data"]["line"].split()[1]))

    tasks = [asyncio.create_task(work) for work in (listen(), *(chat() for _ in range(STREAMS)))]
    await asyncio.sleep(2)
    late.clear()
    tokens[0] = 0
    await asyncio.sleep(seconds)
    figures = {"events": len(late), "tokens_s": tokens[0] / seconds, **milliseconds(late)}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


def milliseconds(late: list[float]) -> dict[str, float]:
    if len(late) < 2:
        return {}
    parts = statistics.quantiles(late, n=100)
    return {"p50_ms": 1000 * parts[49], "p99_ms": 1000 * parts[98], "worst_ms": 1000 * max(late)}


def _in_child(what: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    results.put(asyncio.run(what(*arguments)))


def in_child(what: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_in_child, args=(what, arguments, results))
    child.start()
    found: dict[str, float] = results.get(timeout=300)
    child.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle-s", type=float, default=60)
    parser.add_argument("--status-s", type=float, default=10)
    parser.add_argument("--events-s", type=float, default=15)
    wanted = parser.parse_args()
    environ = {"FAKE_PLANTED": "clock", "FAKE_WORKER": "clock_worker.py"}
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "home", "--port", "0", environ=environ) as daemon,
    ):
        token = daemon.token["authorization"].removeprefix("Bearer ")
        show("idle", idle(daemon, wanted.idle_s))
        show("status", in_child(status, daemon.port, token, wanted.status_s))
        model = tiny_folder(Path(folder) / "bench", {"token_s": TOKEN_S, "at_tokens": {}})
        options = {"max_running_requests": STREAMS}
        daemon.load(model, **options)
        show("events", in_child(events, daemon.port, token, wanted.events_s))
        show("loaded", {"rss_mib": psutil.Process(daemon.process.pid).memory_info().rss / 2**20})


def show(name: str, figures: dict[str, float]) -> None:
    print(json.dumps({name: {key: round(value, 2) for key, value in figures.items()}}), flush=True)


if __name__ == "__main__":
    main()
