"""The loop on its thread: commands in, events out, failures that end one step and failures that end everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from freetoken.core.errors import OutOfMemory
from freetoken.core.events import Failed, GenerationEvent, Progress, Tokens
from freetoken.core.types import FinishReason
from freetoken.engine.loop import EngineLoop
from freetoken.engine.scheduler.scheduler import Told
from freetoken.wire.messages import Stats
from tests.fakes.process import request
from tests.fakes.runner import FakeRunner, limits, oracle


class House:
    """A loop on a thread of its own; `wait` gives up after two seconds."""

    def __init__(self, runner: FakeRunner, **changes: object) -> None:
        self.said: dict[str, list[GenerationEvent]] = {}
        self.batches: list[Sequence[Told]] = []
        self.stats: list[Stats] = []
        self.error: Exception | None = None
        self.loop = EngineLoop(runner, limits(**changes), runner.layout, self._hear, self.stats.append)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    def _hear(self, told: Sequence[Told]) -> None:
        self.batches.append(told)
        for name, event in told:
            self.said.setdefault(name, []).append(event)

    def wait(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 2.0
        while not true():
            assert time.monotonic() < deadline, self.said
            time.sleep(0.002)

    def ended(self, *names: str) -> bool:
        return all(
            isinstance(last := self.said.get(name, [None])[-1], Failed) or getattr(last, "finish", None) is not None
            for name in names
        )

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.said[name] if isinstance(event, Tokens) for token in event.token_ids]

    def now(self) -> Stats:
        """A report asked for now."""
        count = len(self.stats)
        self.loop.report()
        self.wait(lambda: len(self.stats) > count)
        return self.stats[-1]


@contextmanager
def house(runner: FakeRunner | None = None, **changes: object) -> Iterator[House]:
    made = House(runner or FakeRunner(), **changes)
    made.thread.start()
    try:
        yield made
    finally:
        made.loop.stop()
        made.thread.join(5.0)
        assert not made.thread.is_alive()


def test_requests_from_many_threads_are_answered_in_one_batch_a_step() -> None:
    with house(FakeRunner(step_s=0.002)) as h:
        prompts = {f"r{number}": [number, 1, 2] for number in range(8)}
        threads = [
            threading.Thread(target=h.loop.submit, args=(request(name, prompt, 10),))
            for name, prompt in prompts.items()
        ]
        for thread in threads:
            thread.start()
        h.wait(lambda: h.ended(*prompts))
        assert {name: h.tokens(name) for name in prompts} == {name: oracle(p, 10) for name, p in prompts.items()}
        assert max(len({name for name, _ in batch}) for batch in h.batches) >= 3
        assert isinstance(h.said["r0"][0], Progress)


def test_a_refusal_is_published_as_failed_with_its_numbers() -> None:
    with house(max_seq_len=8) as h:
        h.loop.submit(request("a", [1] * 9, 1))
        h.wait(lambda: h.ended("a"))
        (failed,) = h.said["a"]
        assert isinstance(failed, Failed) and failed.code == "CONTEXT_LENGTH_EXCEEDED"
        assert failed.numbers["prompt_tokens"] == 9


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("no memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:30],
)
def test_out_of_memory_fails_the_requests_of_that_step_and_the_loop_goes_on(error: Exception) -> None:
    with house(FakeRunner(errors={3: error}), max_running_requests=1) as h:
        for name in ("a", "b"):
            h.loop.submit(request(name, [1, 2, 3], 6))
        h.wait(lambda: h.ended("a", "b"))
        failed = h.said["a"][-1]
        assert isinstance(failed, Failed) and failed.code == "OUT_OF_MEMORY" and failed.detail
        assert h.tokens("b") == oracle([1, 2, 3], 6)
        stats = h.now()
        assert stats.pages_free + stats.pages_cached == stats.pages_total and h.error is None


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), KeyError("x")])
def test_any_other_error_tells_every_caller_and_ends_the_loop(error: Exception) -> None:
    with house(FakeRunner(step_s=0.002, errors={5: error}), max_running_requests=1) as h:
        for name in ("runs", "waits"):
            h.loop.submit(request(name, [1, 2, 3], 50))
        h.thread.join(2.0)
        assert h.error is error
        for name in ("runs", "waits"):
            last = h.said[name][-1]
            assert isinstance(last, Failed) and last.code == "ENGINE_ERROR" and type(error).__name__ in last.detail


def test_cancel_is_heard_between_steps_and_frees_everything() -> None:
    with house(FakeRunner(limits=limits(num_pages=2000), step_s=0.005), num_pages=2000, max_seq_len=8000) as h:
        h.loop.submit(request("a", [1, 2, 3], 5000))
        h.wait(lambda: len(h.said.get("a", [])) > 3)
        began = time.monotonic()
        h.loop.cancel("a")
        h.loop.cancel("never heard of")
        stats = h.now()
        assert time.monotonic() - began < 1.0
        assert stats.running == 0 and stats.pages_free + stats.pages_cached == stats.pages_total
        heard = len(h.said["a"])
        time.sleep(0.05)
        assert len(h.said["a"]) == heard and not h.ended("a")


def test_pulse_grows_in_a_step_that_hangs_and_is_zero_when_idle() -> None:
    with house(FakeRunner(step_s=0.3)) as h:
        assert h.loop.pulse() == (0, 0)
        h.loop.submit(request("a", [1], 1))
        h.wait(lambda: h.loop.pulse()[1] >= 100)
        assert h.loop.pulse()[0] == 1
        h.wait(lambda: h.loop.pulse() == (1, 0))


def test_stats_come_once_a_second_with_rates_and_expert_counts() -> None:
    with house(FakeRunner(step_s=0.01), max_seq_len=2000) as h:
        h.loop.submit(request("a", [1] * 20, 150))
        h.wait(lambda: h.stats)
        assert not h.ended("a")
        stats = h.stats[0]
        assert (stats.running, stats.queued, stats.pages_total) == (1, 0, 64)
        assert 10 < stats.decode_tok_s < 101 and 10 < stats.prefill_tok_s < 21
        assert stats.layers_routed == stats.experts == 2 and stats.expert_tokens[0][0] > 20
        h.wait(lambda: h.ended("a"))
        assert h.now().output_tokens == 150


def test_a_request_that_waits_too_long_fails_while_another_runs() -> None:
    with house(FakeRunner(step_s=0.005), max_running_requests=1, queue_deadline_s=0.1) as h:
        h.loop.submit(request("runs", [1], 100))
        h.loop.submit(request("waits", [1], 100))
        h.wait(lambda: h.ended("waits"))
        assert h.said["waits"][-1].code == "QUEUE_TIMEOUT"  # type: ignore[union-attr]
        h.wait(lambda: h.ended("runs"))
        assert h.tokens("runs") == oracle([1], 100)


def test_drain_refuses_finishes_and_cancels() -> None:
    with house(FakeRunner(step_s=0.005)) as h:
        h.loop.submit(request("short", [1], 5))
        h.loop.submit(request("long", [2], 200))
        h.loop.drain(0.2)
        h.loop.submit(request("late", [3], 5))
        h.wait(lambda: h.ended("short", "long", "late"))
        assert h.tokens("short") == oracle([1], 5)
        assert h.said["long"][-1] == Tokens((), finish=FinishReason.CANCELLED)
        assert h.said["late"][-1].code == "LIFECYCLE_BUSY"  # type: ignore[union-attr]
        h.wait(lambda: h.stats and h.stats[-1].running == 0)
