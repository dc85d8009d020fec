"""The stream's promises: nothing lost silently, resumable, bounded, paced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.core.errors import TooManyStreams
from freetoken.daemon import listener, pace
from freetoken.daemon.events import PROGRESS, RING, STREAMS, Hub, Query
from freetoken.daemon.listener import QUEUE, Event, Listener, Wanted

T = TypeVar("T")
STATE = "engine.state_changed"


def run(scenario: Callable[[Hub], Awaitable[T]]) -> T:
    async def main() -> T:
        return await asyncio.wait_for(scenario(Hub("epoch", lambda: {"engine": {"state": "stopped"}})), 10)

    return asyncio.run(main())


async def take(stream: Listener, count: int) -> list[Event]:
    taken = [await anext(stream) for _ in range(count)]
    return [event for event in taken if event is not None]


async def read(stream: Listener) -> list[Event]:
    """Everything, as soon as it comes."""
    return [event async for event in stream if event is not None]


def send(hub: Hub, type: str = STATE, data: Any = None, **facts: Any) -> Event:
    event = hub.publish(type, data or {}, **facts)
    assert event is not None
    return event


def test_a_listener_gets_hello_then_snapshot_then_deltas() -> None:
    async def scenario(hub: Hub) -> None:
        send(hub)
        stream = hub.listen()
        hello, snapshot = await take(stream, 2)
        assert (hello.type, snapshot.type, snapshot.data) == (
            "stream.hello",
            "stream.snapshot",
            {"engine": {"state": "stopped"}},
        )
        published = send(hub, "load.phase", {"phase": "plan"}, subject="demo", corr="op_1")
        (live,) = await take(stream, 1)
        assert live == published and live.seq == snapshot.seq + 1
        assert (live.v, live.epoch, live.subject, live.corr) == (1, "epoch", "demo", "op_1")
        stream.close()
        assert hub.listeners == 0

    run(scenario)


def test_resuming_inside_the_ring_gives_exactly_what_was_missed() -> None:
    async def scenario(hub: Hub) -> None:
        types = ("log.line", STATE, "load.progress")
        sent = [send(hub, types[n % 3], subject=f"s{n}") for n in range(12)]
        hello, *missed = await take(hub.listen(Query(sent[5].id)), 7)
        assert hello.type == "stream.hello" and missed == sent[6:]
        at_end = hub.listen(Query(sent[-1].id))
        assert [event.type for event in await take(at_end, 1)] == ["stream.hello"]
        more = send(hub)
        assert await take(at_end, 1) == [more]

    run(scenario)


@pytest.mark.parametrize(
    "after", ["other:3", "epoch:1", "epoch:999999", "nonsense", "epoch:-1", "epoch:²", "epoch:" + "9" * 5000, ":", ""]
)
def test_past_the_ring_a_gap_is_announced_and_a_snapshot_follows(after: str) -> None:
    async def scenario(hub: Hub) -> None:
        for _ in range(RING + 5):
            send(hub)
        hello, gap, snapshot = await take(hub.listen(Query(after)), 3)
        assert (hello.type, gap.type, snapshot.type) == ("stream.hello", "stream.gap", "stream.snapshot")
        assert gap.data == {"after": after, "snapshot": True}
        exact = await take(hub.listen(Query("epoch:5")), 1 + RING)
        assert [event.seq for event in exact[1:]] == list(range(6, RING + 6))

    run(scenario)


def test_a_flood_of_lines_requests_or_samples_pushes_no_state_out_of_the_ring() -> None:
    async def scenario(hub: Hub) -> None:
        first = send(hub)
        states = []
        for n in range(3 * RING):
            send(hub, "log.line", {"n": n})
            send(hub, "request.finished", {"n": n})
            send(hub, "vram.sample", subject=f"gpu {n}")
            if n % 100 == 0:
                states.append(send(hub, "diagnosis.raised", {"n": n}))
        stream = hub.listen(Query(first.id))
        hub.close()
        _, *missed = [event async for event in stream if event is not None]
        assert [event for event in missed if event.type == "diagnosis.raised"] == states
        assert missed[0].type == "stream.gap" and missed[0].data == {"after": first.id, "snapshot": False}
        counted = Counter(event.type for event in missed)
        assert counted["log.line"] == counted["request.finished"] == RING and not counted["stream.snapshot"]
        assert [event.seq for event in missed[1:]] == sorted({event.seq for event in missed[1:]})

    run(scenario)


def test_a_resume_of_more_than_a_queue_is_not_taken_for_slowness() -> None:
    async def scenario(hub: Hub) -> None:
        first = send(hub)
        sent = [send(hub) for _ in range(QUEUE * 2)]
        stream = hub.listen(Query(first.id))
        sent += [send(hub) for _ in range(QUEUE)]
        _, *missed = await take(stream, 1 + len(sent))
        assert missed == sent and not stream.cut.is_set()

    run(scenario)


def test_a_slow_listener_is_cut_off_and_the_others_are_not() -> None:
    async def scenario(hub: Hub) -> None:
        slow, quick = hub.listen(), hub.listen()
        await take(slow, 2)
        await take(quick, 2)
        for _ in range(QUEUE + 1):
            send(hub)
            await take(quick, 1)
        assert slow.cut.is_set() and not quick.cut.is_set()
        assert [event async for event in slow] == []

    run(scenario)


def test_progress_alone_makes_nobody_slow() -> None:
    async def scenario(hub: Hub) -> None:
        stream = hub.listen()
        await take(stream, 2)
        hub.publish(STATE, {})
        for n in range(QUEUE * 3):
            hub._pace.close()  # each is told at once
            hub.publish("load.progress", {"n": n}, subject="demo")
        state, last = await take(stream, 2)
        assert (state.type, last.data, stream.cut.is_set()) == (STATE, {"n": QUEUE * 3 - 1}, False)

    run(scenario)


def test_progress_is_told_five_times_a_second_for_each_subject_and_the_last_of_it_always() -> None:
    async def scenario(hub: Hub) -> None:
        reading = asyncio.create_task(read(hub.listen()))
        for n in range(60):
            for subject in ("a", "b"):
                hub.publish("operation.updated", {"n": n}, subject=subject, progress=True)
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * pace.EVERY_S)
        hub.close()
        told = await reading
        for subject in ("a", "b"):
            mine = [event.data["n"] for event in told if event.subject == subject]
            assert mine[0] == 0 and mine[-1] == 59 and mine == sorted(mine)
            assert len(mine) <= 2 + 0.8 / pace.EVERY_S

    run(scenario)


def test_progress_that_a_state_has_made_stale_is_never_told() -> None:
    async def scenario(hub: Hub) -> None:
        reading = asyncio.create_task(read(hub.listen()))
        await asyncio.sleep(0)
        hub.publish("load.progress", {"n": 1}, subject="demo")
        hub.publish("load.progress", {"n": 2}, subject="demo")
        hub.publish("load.progress", {"n": 2}, subject="other")
        await asyncio.sleep(0.01)
        hub.publish("load.progress", {"n": 3}, subject="other")
        send(hub, "load.completed", {}, subject="demo")
        await asyncio.sleep(1.5 * pace.EVERY_S)
        hub.close()
        told = [(event.type, event.subject, event.data.get("n")) for event in await reading][2:]
        assert told == [
            ("load.progress", "demo", 1),
            ("load.progress", "other", 2),
            ("load.completed", "demo", None),
            ("load.progress", "other", 3),
        ]

    run(scenario)


def test_heartbeats_come_when_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEARTBEAT_S", 0.01)

    async def scenario(hub: Hub) -> None:
        stream = hub.listen()
        await take(stream, 2)
        assert await anext(stream) is None
        assert hub.heartbeat().type == "stream.heartbeat"

    run(scenario)


def test_filters_take_prefixes_of_types_and_whole_subjects_and_keep_the_stream_events() -> None:
    async def scenario(hub: Hub) -> None:
        by_type = hub.listen(Query(wants=Wanted(("engine", "load.failed"))))
        by_both = hub.listen(Query(wants=Wanted(("load",), frozenset({"demo"}))))
        for type in ("log.line", "engine.crashed", "load.phase", "load.failed"):
            for subject in ("demo", "demo2"):
                send(hub, type, subject=subject)
        hub.close()
        seen = [[(e.type, e.subject) async for e in stream if e is not None] for stream in (by_type, by_both)]
        begin = [("stream.hello", None), ("stream.snapshot", None)]
        both = [(type, subject) for type in ("engine.crashed", "load.failed") for subject in ("demo", "demo2")]
        assert seen == [[*begin, *both], [*begin, ("load.phase", "demo"), ("load.failed", "demo")]]

    run(scenario)


def test_streams_are_bounded() -> None:
    async def scenario(hub: Hub) -> None:
        open = [hub.listen() for _ in range(STREAMS)]
        with pytest.raises(TooManyStreams):
            hub.listen()
        open[0].close()
        hub.listen()

    run(scenario)


def test_a_stage_may_change_or_withhold_data_and_leaves_no_hole() -> None:
    async def scenario(hub: Hub) -> None:
        hub.stage("log.line", lambda data, source: None if data["line"] == "secret" else {"by": source})
        first = send(hub, "log.line", {"line": "x"}, source="engine")
        assert hub.publish("log.line", {"line": "secret"}) is None
        assert first.data == {"by": "engine"}
        assert send(hub).seq == first.seq + 1

    run(scenario)


def test_close_ends_every_stream_after_what_is_queued() -> None:
    async def scenario(hub: Hub) -> None:
        stream = hub.listen()
        await take(stream, 2)
        send(hub, data={"state": "stopped"})
        hub.close()
        assert [event.type async for event in stream if event] == [STATE]
        assert [event.type async for event in hub.listen() if event] == ["stream.hello", "stream.snapshot"]

    run(scenario)


@given(st.lists(st.sampled_from([*sorted(PROGRESS), STATE, "diagnosis.raised", "log.line"]), max_size=80))
def test_only_progress_is_merged_and_the_last_of_each_survives(types: list[str]) -> None:
    async def scenario(hub: Hub) -> None:
        stream = hub.listen()
        await take(stream, 2)
        sent = []
        for n, type in enumerate(types):
            hub._pace.close()  # each is told at once
            sent.append(send(hub, type, {"n": n}, subject="s"))
        hub.close()
        got = [event async for event in stream if event is not None]
        assert [e for e in got if e.type not in PROGRESS] == [e for e in sent if e.type not in PROGRESS]
        assert [e.seq for e in got] == sorted(e.seq for e in got)
        for type in set(types):
            assert [e for e in sent if e.type == type][-1] in got

    run(scenario)
