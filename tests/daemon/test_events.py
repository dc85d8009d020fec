"""The stream's promises: nothing lost silently, resumable, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.daemon import events
from freetoken.daemon.events import QUEUE, RING, Event, Hub

T = TypeVar("T")


def run(scenario: Callable[[Hub], Awaitable[T]]) -> T:
    async def main() -> T:
        return await asyncio.wait_for(scenario(Hub("epoch", lambda: {"engine": {"state": "stopped"}})), 10)

    return asyncio.run(main())


async def take(stream: AsyncGenerator[Event | None, None], count: int) -> list[Event]:
    taken = [await anext(stream) for _ in range(count)]
    return [event for event in taken if event is not None]


def test_a_listener_gets_hello_then_snapshot_then_deltas() -> None:
    async def scenario(hub: Hub) -> None:
        hub.publish("engine.state_changed", {"state": "starting"})
        stream = hub.listen()
        hello, snapshot = await take(stream, 2)
        assert (hello.type, snapshot.type, snapshot.data) == (
            "stream.hello",
            "stream.snapshot",
            {"engine": {"state": "stopped"}},
        )
        published = hub.publish("load.phase", {"phase": "plan"}, subject="demo", corr="op_1")
        (live,) = await take(stream, 1)
        assert live == published and live.seq == snapshot.seq + 1
        assert (live.v, live.epoch, live.subject, live.corr) == (1, "epoch", "demo", "op_1")
        await stream.aclose()
        assert hub.listeners == 0

    run(scenario)


def test_resuming_inside_the_ring_gives_exactly_what_was_missed() -> None:
    async def scenario(hub: Hub) -> None:
        sent = [hub.publish("log.line", {"line": str(i)}) for i in range(10)]
        stream = hub.listen(after=sent[5].id)
        hello, *missed = await take(stream, 5)
        assert hello.type == "stream.hello" and missed == sent[6:]
        stream_at_end = hub.listen(after=sent[-1].id)
        assert [event.type for event in await take(stream_at_end, 1)] == ["stream.hello"]

    run(scenario)


@pytest.mark.parametrize("after", ["other:3", "epoch:1", "epoch:999999", "nonsense", "epoch:-1", "epoch:²"])
def test_past_the_ring_a_gap_is_announced_and_a_snapshot_follows(after: str) -> None:
    async def scenario(hub: Hub) -> None:
        for i in range(RING + 5):
            hub.publish("log.line", {"line": str(i)})
        types = [event.type for event in await take(hub.listen(after=after), 3)]
        assert types == ["stream.hello", "stream.gap", "stream.snapshot"]

    run(scenario)


def test_a_resume_of_more_than_a_queue_is_not_taken_for_slowness() -> None:
    async def scenario(hub: Hub) -> None:
        first = hub.publish("log.line", {})
        sent = [hub.publish("log.line", {"n": i}) for i in range(QUEUE * 2)]
        _, *missed = await take(hub.listen(after=first.id), 1 + len(sent))
        assert missed == sent

    run(scenario)


def test_a_slow_listener_is_disconnected_and_the_others_are_not() -> None:
    async def scenario(hub: Hub) -> None:
        slow, quick = hub.listen(), hub.listen()
        await take(slow, 2)
        await take(quick, 2)
        for _ in range(QUEUE + 1):
            hub.publish("log.line", {})
            await take(quick, 1)
        rest = [event async for event in slow]
        assert [event for event in rest if event is not None] == []
        assert hub.listeners == 1

    run(scenario)


def test_heartbeats_come_when_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.01)

    async def scenario(hub: Hub) -> None:
        stream = hub.listen()
        await take(stream, 2)
        assert await anext(stream) is None

    run(scenario)


def test_filters_take_prefixes_and_keep_the_stream_events() -> None:
    async def scenario(hub: Hub) -> None:
        stream = hub.listen(types=("engine", "load.failed"))
        await take(stream, 2)
        for type in ("log.line", "engine.crashed", "load.phase", "load.failed"):
            hub.publish(type, {})
        assert [event.type for event in await take(stream, 2)] == ["engine.crashed", "load.failed"]

    run(scenario)


def test_close_ends_every_stream_after_what_is_queued() -> None:
    async def scenario(hub: Hub) -> None:
        stream = hub.listen()
        await take(stream, 2)
        hub.publish("engine.state_changed", {"state": "stopped"})
        hub.close()
        assert [event.type async for event in stream if event] == ["engine.state_changed"]
        assert [event.type async for event in hub.listen() if event] == ["stream.hello", "stream.snapshot"]

    run(scenario)


@given(st.lists(st.sampled_from(["load.progress", "engine.state_changed", "vram.sample", "log.line"]), max_size=60))
def test_only_progress_and_samples_are_merged_and_the_last_of_each_survives(types: list[str]) -> None:
    async def scenario(hub: Hub) -> None:
        stream = hub.listen()
        await take(stream, 2)
        sent = [hub.publish(type, {"n": n}, subject="s") for n, type in enumerate(types)]
        hub.close()
        got = [event async for event in stream if event is not None]
        assert [e for e in got if e.type not in events.MERGED] == [e for e in sent if e.type not in events.MERGED]
        assert [e.seq for e in got] == sorted(e.seq for e in got)
        for type in set(types):
            assert [e for e in sent if e.type == type][-1] in got

    run(scenario)
