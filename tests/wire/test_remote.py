"""RemoteEngine against engine processes: real sockets, real processes, a fake model."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from freetoken import __version__
from freetoken.core.errors import DeadlineExceeded, EngineDied, EngineProtocolError, UsageError
from freetoken.core.events import Failed, Progress, Tokens
from freetoken.wire import channel, codec
from freetoken.wire import messages as m
from freetoken.wire.remote import RemoteEngine
from freetoken.wire.rendezvous import Rendezvous
from tests.fakes.process import PLAN, collect, engine_process, load_events, request, run
from tests.fakes.runner import oracle

PROMPT = list(range(40))


async def stats_until(engine: RemoteEngine, wanted: object, timeout_s: float = 1.0) -> m.Stats:
    """Ask for stats until `wanted` holds of them; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not wanted(stats := await engine.status()):  # type: ignore[operator]
            await asyncio.sleep(0.01)
    return stats


def all_free(stats: m.Stats) -> bool:
    return stats.running == stats.queued == 0 and stats.pages_free + stats.pages_cached == stats.pages_total


def test_load_reports_phases_then_ready_and_streams_are_the_oracles(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.connect()
            assert (engine.hello.build, engine.hello.instance_id) == (__version__, process.where.instance_id)
            events = await load_events(engine, process.files())
            assert [e.done for e in events if isinstance(e, m.Phase) and e.name == "read_weights"] == [0, 100]
            assert isinstance(events[-1], m.Ready)
            assert events[-1].measured["weights_bytes"] == 12 and "load_s" in events[-1].measured
            names = [f"r{number}" for number in range(12)]
            prompts = [PROMPT[: 5 + 3 * number] for number in range(12)]
            streams = [collect(engine.generate(request(*pair, 20))) for pair in zip(names, prompts, strict=True)]
            assert await asyncio.gather(*streams) == [oracle(prompt, 20) for prompt in prompts]
            events = [event async for event in engine.generate(request("again", PROMPT, 2))]
            assert isinstance(events[0], Progress)
            stats = await stats_until(engine, all_free)
            assert stats.output_tokens == 12 * 20 + 2 and stats.layers_routed == stats.experts == 2
            assert await engine.shutdown()
            assert await process.exit_code() == 0

    run(test)


def test_closing_a_stream_frees_its_pages_within_a_second(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.loaded(step_s=0.005)
            stream = engine.generate(request("a", PROMPT, 4000))
            seen = 0
            async for event in stream:
                seen += isinstance(event, Tokens)
                if seen == 3:
                    break
            began = time.monotonic()
            await stream.aclose()
            stats = await stats_until(engine, all_free)
            assert time.monotonic() - began < 1.0
            assert 3 <= stats.output_tokens < 50
            await engine.close()

    run(test)


def test_an_early_close_sends_exactly_one_cancel_and_a_finished_stream_none() -> None:
    async def test() -> None:
        where = Rendezvous.new()
        got: list[m.Down] = []

        async def engine(daemon: channel.Channel[m.Down]) -> None:
            hello = await daemon.receive()
            assert isinstance(hello, m.Hello)
            daemon.send(hello)
            while (message := await daemon.receive()) is not None:
                got.append(message)
                if isinstance(message, m.Submit):
                    daemon.send(m.Tokens(id=message.id, token_ids=(1,)))
                    if message.id != "closed":
                        daemon.send(m.Tokens(id=message.id, token_ids=(2,), finish="stop"))  # type: ignore[arg-type]

        listener = await channel.serve(where.socket, codec.DOWN, engine)
        remote = await RemoteEngine.connect(where)
        stream = remote.generate(request("closed", [1], 9))
        await anext(stream)
        with pytest.raises(UsageError, match="already running"):
            await anext(remote.generate(request("closed", [1], 9)))
        await stream.aclose()
        await stream.aclose()
        assert await collect(remote.generate(request("finished", [1], 9))) == [1, 2]
        at_its_end = remote.generate(request("at its end", [1], 9))
        await anext(at_its_end), await anext(at_its_end)
        await at_its_end.aclose()
        unread = remote.generate(request("never begun", [1], 9))
        await unread.aclose()
        await collect(remote.generate(request("last", [1], 9)))  # whatever was sent before has arrived
        assert [message for message in got if isinstance(message, m.Cancel)] == [m.Cancel(id="closed")]
        submitted = [message.id for message in got if isinstance(message, m.Submit)]
        assert submitted == ["closed", "finished", "at its end", "last"]
        await remote.close()
        listener.close()
        channel.remove(where.socket)

    run(test)


def test_killed_engine_ends_all_streams_within_a_second(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.loaded(step_s=0.005)
            streams = [engine.generate(request(name, PROMPT, 4000)) for name in "abc"]
            for stream in streams:
                await anext(stream)
            waiting = asyncio.create_task(engine.status())
            process.process.kill()
            began = time.monotonic()
            ends = await asyncio.gather(*(collect(stream) for stream in streams), return_exceptions=True)
            assert time.monotonic() - began < 1.0
            assert all(isinstance(end, EngineDied) for end in ends), ends
            await asyncio.gather(waiting, return_exceptions=True)
            assert engine.gone is not None and "gone" in (await engine.wait_gone()).detail
            with pytest.raises(EngineDied):
                await anext(engine.generate(request("late", PROMPT, 1)))
            with pytest.raises(EngineDied):
                await engine.status()

    run(test)


def test_killed_while_loading_raises_engine_died(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.connect()
            loading = engine.load(PLAN, process.files(load_s=20.0))
            assert isinstance(await anext(loading), m.Phase)
            process.process.kill()
            with pytest.raises(EngineDied):
                async for _ in loading:
                    pass

    run(test)


def test_refusals_of_the_engine_arrive_typed(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            early = await process.connect()
            with pytest.raises(DeadlineExceeded):
                await early.status(timeout_s=0.05)
            events = [event async for event in early.generate(request("early", [1], 1))]
            assert [event.code for event in events if isinstance(event, Failed)] == ["MODEL_NOT_LOADED"]
            await load_events(early, process.files(errors={"2": "allocation"}))
            (too_long,) = [event async for event in early.generate(request("long", [1] * 5000, 1))]
            assert isinstance(too_long, Failed) and too_long.code == "CONTEXT_LENGTH_EXCEEDED"
            assert too_long.numbers["prompt_tokens"] == 5000
            *_, out = [event async for event in early.generate(request("oom", [1, 2], 5))]
            assert isinstance(out, Failed) and out.code == "OUT_OF_MEMORY"
            assert await collect(early.generate(request("after", [1, 2], 5))) == oracle([1, 2], 5)
            assert all_free(await early.status())
            (second,) = await load_events(early, process.files())
            assert isinstance(second, m.Failed) and second.code == "LIFECYCLE_BUSY"
            await early.close()

    run(test)


@pytest.mark.parametrize("change", [{"nonce": "wrong"}, {"proto": 99}])
def test_a_stranger_is_turned_away_and_the_engine_lives(tmp_path: Path, change: dict[str, object]) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            await process.connect()
            where = msgspec.structs.replace(process.where, **change)
            connection = await channel.connect(where.socket, codec.UP, 5.0)
            connection.send(m.Hello(proto=where.proto, instance_id="x", nonce=where.nonce, build="9"))
            answer = await connection.receive()
            if "proto" in change:  # told which protocol the engine speaks, without its secret
                assert isinstance(answer, m.Hello) and (answer.proto, answer.nonce) == (m.PROTO, "")
                answer = await connection.receive()
            assert answer is None
            await connection.close()
            assert process.process.returncode is None

    run(test)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (m.Hello(proto=m.PROTO + 1, instance_id="i", nonce="", build="9.9"), "speaks protocol 2"),
        (m.Hello(proto=m.PROTO, instance_id="i", nonce="guess", build="0"), "another secret"),
        (m.Beat(step=0, step_age_ms=0), "did not begin with a hello"),
        (None, "did not begin with a hello"),
    ],
    ids=["another protocol", "another secret", "no hello", "closes"],
)
def test_connecting_to_a_stranger_says_what_is_wrong(answer: m.Message | None, reason: str) -> None:
    async def test() -> None:
        where = Rendezvous.new()

        async def stranger(daemon: channel.Channel[m.Down]) -> None:
            await daemon.receive()
            daemon.send(*([answer] if answer else []))
            await daemon.close()

        listener = await channel.serve(where.socket, codec.DOWN, stranger)
        with pytest.raises(EngineProtocolError, match=reason):
            await RemoteEngine.connect(where)
        listener.close()
        channel.remove(where.socket)

    run(test)


def test_a_second_daemon_is_turned_away_while_the_first_is_there(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            first = await process.loaded()
            with pytest.raises(EngineProtocolError, match="hello"):
                await process.connect()
            assert await collect(first.generate(request("a", [1], 3))) == oracle([1], 3)
            await first.close()

    run(test)


def test_drain_finishes_what_runs_refuses_what_comes_and_cancels_at_the_deadline(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.loaded(step_s=0.005)
            short, long = (engine.generate(request(str(most), PROMPT, most)) for most in (20, 4000))
            await anext(short), await anext(long)
            engine.drain(0.4)
            (refused,) = [event async for event in engine.generate(request("late", [1], 1))]
            assert isinstance(refused, Failed) and refused.code == "LIFECYCLE_BUSY"
            assert await collect(short) == oracle(PROMPT, 20)
            *_, last = [event async for event in long]
            assert isinstance(last, Tokens) and last.finish == "cancelled"
            assert all_free(await engine.status())
            await engine.close()

    run(test)


@pytest.mark.slow
def test_beats_and_stats_come_by_themselves(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.loaded(step_s=1.4)
            beats: list[m.Beat] = []
            stats: list[m.Stats] = []
            engine.on_beat, engine.on_stats = beats.append, stats.append
            await collect(engine.generate(request("a", [1], 2)))
            assert max(beat.step_age_ms for beat in beats) >= 400  # seen from outside while a step hangs
            assert {beat.step for beat in beats} >= {1, 2}
            await asyncio.sleep(1.1)
            assert engine.beat is beats[-1] and beats[-1].step_age_ms == 0
            assert engine.stats is stats[-1] and stats[-1].rss_bytes > 1 << 20
            await engine.close()

    run(test)
