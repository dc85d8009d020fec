"""The backend without a process: the same promises as wire.remote."""

from __future__ import annotations

import asyncio

import pytest

from freetoken.core.errors import EngineDied, UsageError
from freetoken.core.events import Failed, Progress, Tokens
from freetoken.core.ports import GenerationBackend
from freetoken.core.types import FinishReason
from freetoken.engine.inproc import InprocBackend
from tests.fakes.process import collect, request, run
from tests.fakes.runner import FakeRunner, limits, oracle


def test_streams_are_the_oracles_and_end_with_a_reason() -> None:
    async def test() -> None:
        async with InprocBackend(FakeRunner(), limits()) as backend:
            port: GenerationBackend = backend
            events = [event async for event in port.generate(request("a", [1, 2, 3], 3))]
            a, b, c = oracle([1, 2, 3], 3)
            assert events == [
                Progress(3, 3),
                Tokens((a,), cached=0),
                Tokens((b,)),
                Tokens((c,), finish=FinishReason.LENGTH),
            ]
            prompts = [[number] * 5 for number in range(9)]
            streams = [collect(port.generate(request(f"r{prompt[0]}", prompt, 7))) for prompt in prompts]
            assert await asyncio.gather(*streams) == [oracle(prompt, 7) for prompt in prompts]

    run(test)


def test_an_early_close_makes_room_for_the_next() -> None:
    async def test() -> None:
        async with InprocBackend(FakeRunner(step_s=0.002), limits(max_running_requests=1)) as backend:
            stream = backend.generate(request("a", [1], 250))
            await anext(stream)
            waiting = asyncio.create_task(collect(backend.generate(request("b", [2], 3))))
            with pytest.raises(UsageError):
                await anext(backend.generate(request("a", [1], 1)))
            await stream.aclose()
            async with asyncio.timeout(0.3):
                assert await waiting == oracle([2], 3)

    run(test)


def test_a_reader_whose_task_is_cancelled_cancels_its_request() -> None:
    async def test() -> None:
        async with InprocBackend(FakeRunner(step_s=0.002), limits(max_running_requests=1)) as backend:
            reading = asyncio.create_task(collect(backend.generate(request("a", [1], 250))))
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            async with asyncio.timeout(0.3):
                assert await collect(backend.generate(request("b", [2], 3))) == oracle([2], 3)

    run(test)


def test_closing_the_backend_ends_streams_in_flight_and_to_come() -> None:
    async def test() -> None:
        backend = InprocBackend(FakeRunner(step_s=0.002), limits())
        stream = backend.generate(request("a", [1], 250))
        await anext(stream)
        await backend.close()
        with pytest.raises(EngineDied, match="closed"):
            await collect(stream)
        with pytest.raises(EngineDied):
            await anext(backend.generate(request("b", [1], 1)))

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_step_fails_its_callers_and_then_the_engine_is_gone() -> None:
    async def test() -> None:
        async with InprocBackend(FakeRunner(errors={2: ValueError("a bug")}), limits()) as backend:
            events = [event async for event in backend.generate(request("a", [1], 9))]
            assert isinstance(events[-1], Failed) and "a bug" in events[-1].detail
            await asyncio.sleep(0.05)
            with pytest.raises(EngineDied, match="a bug"):
                await anext(backend.generate(request("b", [1], 1)))

    run(test)
