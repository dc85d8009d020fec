"""The event stream of a real daemon, through its three doors: SSE, WebSocket, and the log's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect as dial
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from freetoken.client import discovery, live
from freetoken.core.errors import DaemonNotReachable, FreeTokenError
from freetoken.daemon.events import PROGRESS, STREAMS
from tests.fakes.folder import tiny_folder
from tests.fakes.planted import FLOOD
from tests.fakes.running import Daemon, event_stream, running

Event = dict[str, Any]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(
        tmp_path_factory.mktemp("streams") / "home", "--port", "0", environ={"FAKE_PLANTED": "flood"}
    ) as found:
        yield found


@contextmanager
def ws_stream(daemon: Daemon, query: str = "", path: str = "/api/v1/events/ws") -> Iterator[Iterator[Event]]:
    url = f"ws://127.0.0.1:{daemon.port}{path}{query}"
    with connect(url, additional_headers=daemon.token, proxy=None) as connection:
        yield (json.loads(message) for message in connection)


def until(events: Iterator[Event], type: str) -> list[Event]:
    """Events up to the first of `type`."""
    seen: list[Event] = []
    while not seen or seen[-1]["type"] != type:
        seen.append(next(events))
    return seen


def flood(daemon: Daemon, count: int, **how: Any) -> None:
    assert daemon.ask("POST", FLOOD, {"count": count, **how}).status == 200


def plain(event: Event) -> Event:
    """Without what only SSE has."""
    return {name: value for name, value in event.items() if name != "id"}


def test_both_doors_say_the_same(daemon: Daemon, tmp_path: Path) -> None:
    with event_stream(daemon) as sse, ws_stream(daemon) as ws:
        for events in (sse, ws):
            assert [next(events)["type"] for _ in range(2)] == ["stream.hello", "stream.snapshot"]
        daemon.load(tiny_folder(tmp_path / "good"))
        over_sse, over_ws = until(sse, "load.completed"), until(ws, "load.completed")
        told = [[plain(e) for e in events if e["type"] not in PROGRESS] for events in (over_sse, over_ws)]
        assert told[0] == told[1] and len(told[0]) > 10
    daemon.ask("POST", "/api/v1/engine/unload", prefer="wait=20")


@pytest.mark.parametrize("door", [event_stream, ws_stream])
def test_a_stream_resumes_exactly_or_says_that_it_cannot(daemon: Daemon, door: Any) -> None:
    with door(daemon) as events:
        next(events), next(events)
        flood(daemon, 100)
        seen = [next(events) for _ in range(91)]
    for index in (0, 40, 90):
        with door(daemon, f"?after={seen[index]['epoch']}:{seen[index]['seq']}") as events:
            assert next(events)["type"] == "stream.hello"
            missed = [plain(next(events)) for _ in seen[index + 1 :]]
            assert missed == [plain(event) for event in seen[index + 1 :]]
    with door(daemon, "?after=another-daemon:5") as events:
        assert [next(events)["type"] for _ in range(3)] == ["stream.hello", "stream.gap", "stream.snapshot"]


@pytest.mark.parametrize("door", [event_stream, ws_stream])
def test_a_stream_can_be_narrowed_by_type_and_subject(daemon: Daemon, door: Any) -> None:
    with door(daemon, "?types=diagnosis,load.failed,operation&subjects=planted,x") as events:
        assert daemon.ask("POST", "/api/v1/engine/load", {"model": str(daemon.home)}).status == 202  # another subject
        flood(daemon, 200)
        types = [next(events)["type"] for _ in range(6)]
        assert types == ["stream.hello", "stream.snapshot", *["diagnosis.raised", "load.failed"] * 2]


def every_place_is_free(daemon: Daemon) -> bool:
    """Whether as many streams can be opened as there may be."""
    with ExitStack() as stack:
        try:
            return all(next(stack.enter_context(ws_stream(daemon))) for _ in range(STREAMS))
        except (ConnectionClosed, StopIteration):
            return False


def wait_for_free_places(daemon: Daemon) -> None:
    deadline = time.monotonic() + 15
    while not every_place_is_free(daemon):
        assert time.monotonic() < deadline, "a stream that is over holds its place"
        time.sleep(0.1)


def test_a_client_that_goes_away_leaves_nothing_behind(daemon: Daemon) -> None:
    for door in (ws_stream, event_stream):
        for _ in range(STREAMS // 4):
            with door(daemon) as events:
                next(events)
    wait_for_free_places(daemon)


def test_streams_are_bounded_and_say_so(daemon: Daemon) -> None:
    wait_for_free_places(daemon)
    with ExitStack() as stack:
        for _ in range(STREAMS):
            next(stack.enter_context(ws_stream(daemon)))
        refused = daemon.ask("GET", "/api/v1/events")
        assert (refused.status, refused.json["code"]) == (429, "TOO_MANY_STREAMS")
        url = f"ws://127.0.0.1:{daemon.port}/api/v1/events/ws"
        with connect(url, additional_headers=daemon.token, proxy=None) as one_more:
            assert close_code(one_more) == 4429
    wait_for_free_places(daemon)


def close_code(connection: ClientConnection) -> int | None:
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            connection.recv(timeout=15)
    return closed.value.rcvd.code if closed.value.rcvd else None


def narrow(daemon: Daemon) -> socket.socket:
    """A connection that takes little before its reader does."""
    plug = socket.socket()
    plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plug.connect(("127.0.0.1", daemon.port))
    return plug


def test_a_slow_websocket_is_disconnected_with_its_own_code_and_resumes_without_a_loss(daemon: Daemon) -> None:
    seen: list[Event] = []
    url = f"ws://127.0.0.1:{daemon.port}/api/v1/events/ws"
    with connect(url, sock=narrow(daemon), additional_headers=daemon.token, proxy=None, max_queue=1) as connection:
        flood(daemon, 1000, pad=20_000, pause_s=0.001)
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                seen.append(json.loads(connection.recv(timeout=10)))
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4408
    kept = [event for event in seen if event["type"] not in PROGRESS][2:]
    assert len(kept) < 900
    with ws_stream(daemon, f"?after={seen[-1]['epoch']}:{seen[-1]['seq']}") as events:
        assert next(events)["type"] == "stream.hello"
        while len(kept) < 900:
            kept += [event for event in [next(events)] if event["type"] not in PROGRESS]
    assert [event["data"]["n"] for event in kept] == [n for n in range(1000) if n % 10 != 5]


@pytest.mark.parametrize("door", ["events", "events/ws"])
def test_a_client_that_reads_nothing_at_all_is_let_go(daemon: Daemon, door: str) -> None:
    wait_for_free_places(daemon)
    upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    headers = f"host: 127.0.0.1\r\nauthorization: {daemon.token['authorization']}\r\n"
    key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    with narrow(daemon) as deaf:
        deaf.sendall(f"GET /api/v1/{door} HTTP/1.1\r\n{headers}{upgrade if 'ws' in door else ''}{key}\r\n".encode())
        time.sleep(0.2)
        assert not every_place_is_free(daemon)
        flood(daemon, 2000, pad=20_000, pause_s=0.001)
        wait_for_free_places(daemon)


# ── the log ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_log_lines_come_numbered_levelled_and_harmless_by_page_and_by_stream(daemon: Daemon, tmp_path: Path) -> None:
    secret = daemon.token["authorization"].removeprefix("Bearer ")
    nasty = f"WARNING \x1b[31m{Path.home()}/models {secret} hf_abcdefghijklmnopqrst \x07"
    model = tiny_folder(tmp_path / "chatty", {"says": nasty})
    with ws_stream(daemon, "?source=engine", "/api/v1/logs/ws") as events:
        assert next(events)["type"] == "stream.hello"
        assert [line for line in next(events)["data"]["lines"] if line["source"] != "engine"] == []
        daemon.load(model)
        told = next(events)
    line = told["data"]
    shown = line["line"]
    assert (told["type"], told["source"], line["source"], line["level"]) == ("log.line", "engine", "engine", "warning")
    assert shown == "WARNING \\x1b[31m~/models [redacted] [redacted] \\x07"
    page = daemon.ask("GET", "/api/v1/logs?source=engine&level=warning").json
    assert page["lines"][-1] == line and page["newest"] >= line["seq"]
    assert daemon.ask("GET", f"/api/v1/logs?source=engine&after={line['seq']}").json["lines"] == []
    assert line not in daemon.ask("GET", "/api/v1/logs?source=engine&level=error").json["lines"]
    assert {line["source"] for line in daemon.ask("GET", "/api/v1/logs").json["lines"]} == {"daemon", "engine"}
    for bad in ("level=loud", "limit=0", "limit=1001", "after=-1", "after=x"):
        assert daemon.ask("GET", f"/api/v1/logs?{bad}").json["code"] == "MALFORMED_BODY"
    daemon.ask("POST", "/api/v1/engine/unload", prefer="wait=20")


def test_the_log_of_an_earlier_daemon_can_be_read(tmp_path: Path) -> None:
    with running(tmp_path / "home", "--port", "0") as first:
        pid = first.process.pid
    with running(tmp_path / "home", "--port", "0") as second:
        lines = second.ask("GET", "/api/v1/logs?source=daemon").json["lines"]
    (old,) = [line for line in lines if f"(pid {pid}," in line["line"]]
    assert old["line"].startswith("freetoken.daemon.main: listening at ") and old["level"] == "info"
    assert abs(time.time() - _unix(old["time"])) < 60


def _unix(time: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(time).timestamp()


# ── the end of the daemon, and the client of ours ───────────────────────────────────────────────────────────────────
def test_the_end_of_the_daemon_closes_streams_in_order_and_our_client_says_that_it_is_gone(tmp_path: Path) -> None:
    with running(tmp_path / "home", "--port", "0") as daemon:
        address = discovery.find(daemon.home)
        events = live.events(address, types=("engine", "operation"))
        assert [next(events).type for _ in range(2)] == ["stream.hello", "stream.snapshot"]
        lines = live.logs(address, source="daemon", level="info")
        assert [next(lines).type for _ in range(2)] == ["stream.hello", "stream.snapshot"]
        url = f"ws://127.0.0.1:{daemon.port}/api/v1/events/ws"
        with connect(url, additional_headers=daemon.token, proxy=None) as connection:
            assert daemon.ask("POST", "/api/v1/daemon/shutdown", {"engine": "stop"}).status == 202
            assert close_code(connection) == 1001
        assert daemon.process.wait(10) == 0
        with pytest.raises(DaemonNotReachable):
            list(events)


def test_our_client_resumes_where_it_was_and_says_why_it_is_refused(daemon: Daemon) -> None:
    address = discovery.find(daemon.home)
    events = live.events(address, subjects=("planted",), types=("planted",))
    assert [next(events).type for _ in range(2)] == ["stream.hello", "stream.snapshot"]
    flood(daemon, 10)
    first = next(events)
    again = live.events(address, types=("planted",), after=f"{first.epoch}:{first.seq}")
    assert [event.data.get("n") for _, event in zip(range(8), again, strict=False)] == [None, 2, 3, 4, 6, 7, 8, 9]
    stranger = discovery.Address(address.url, address.pid, address.start_time, address.instance_id, "", "wrong")
    with pytest.raises(FreeTokenError, match="token") as refused:
        next(live.events(stranger))
    assert refused.value.code == "UNAUTHORIZED"


# ── many clients ────────────────────────────────────────────────────────────────────────────────────────────────────
COUNT, CLIENTS = 10_000, 50
IMPORTANT = frozenset({"engine.state_changed", "diagnosis.raised", "load.failed"})


async def follow(daemon: Daemon, *, pause_s: float) -> tuple[list[tuple[int, str]], int]:
    """(seq, type) of every planted event up to the last, over as many connections as it took, and their number."""
    seen: list[tuple[int, str]] = []
    after, dials = "", 0
    while True:
        dials += 1
        url = f"ws://127.0.0.1:{daemon.port}/api/v1/events/ws?subjects=planted{after}"
        plug = narrow(daemon) if pause_s else None
        async with dial(url, sock=plug, additional_headers=daemon.token, proxy=None, max_queue=4) as connection:
            with contextlib.suppress(ConnectionClosed):
                async for message in connection:
                    event = json.loads(message)
                    if event["subject"] != "planted":
                        continue
                    seen.append((event["seq"], event["type"]))
                    after = f"&after={event['epoch']}:{event['seq']}"
                    if event["data"]["n"] == COUNT - 1:
                        return seen, dials
                    if pause_s and len(seen) % 50 == 0:
                        await asyncio.sleep(pause_s)


@pytest.mark.slow
def test_fifty_fast_clients_see_every_event_and_a_slow_one_every_state_diagnosis_and_error(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(120):
            clients = [asyncio.create_task(follow(daemon, pause_s=pause)) for pause in (0.2, *[0.0] * CLIENTS)]
            await asyncio.sleep(1.0)
            await asyncio.to_thread(flood, daemon, COUNT, pad=1000, pause_s=0.005, background=True)
            (slow, dials), (every, _), *others = await asyncio.gather(*clients)
        assert [seq for seq, _ in every] == list(range(every[0][0], every[-1][0] + 1))
        assert all(seen == every for seen, _ in others)
        important = [event for event in every if event[1] in IMPORTANT]
        assert [event for event in slow if event[1] in IMPORTANT] == important and len(important) == 3 * COUNT // 100
        assert dials > 1 and len(slow) < len(every)

    asyncio.run(scenario())
