"""Steps that run out of memory: tried again smaller, to the same tokens, and never the death of the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from freetoken.core.errors import OutOfMemory
from freetoken.core.events import Failed, GenerationEvent, Tokens
from freetoken.core.types import GenerateRequest, SamplingParams
from freetoken.engine.assemble import Engine
from freetoken.engine.loop import EngineLoop, StepRunner
from freetoken.engine.paging.rules import Layout
from freetoken.engine.scheduler.retry import FLOOR, RECOVERY, StepSize
from freetoken.engine.scheduler.scheduler import Told
from freetoken.engine.step import StepPlan, StepResult, Work
from freetoken.plan.choices import Resolved
from tests.fakes.checkpoint import VOCAB, tiny
from tests.fakes.driver import GREEDY, Driver, engine, resolved
from tests.fakes.runner import FakeRunner, limits, oracle
from tests.fakes.schedule import Bench, prompt

torch.set_num_threads(1)


def _step(*tokens: int) -> StepPlan:
    return StepPlan(tuple(Work(str(i), (0,) * n, 0, (0,), True, GREEDY) for i, n in enumerate(tokens)))


# ── the ladder ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_prefill_is_halved_to_the_floor_then_the_requests_then_nothing_is_left() -> None:
    size, seen = StepSize(tokens=100, works=4), []
    while size.failed(_step(*[1] * (size.works - 1), size.tokens if size.works > 1 else 1)):
        seen.append((size.tokens, size.works))
    assert seen == [(50, 4), (25, 4), (FLOOR, 4), (FLOOR, 2), (FLOOR, 1)]
    assert not size.failed(_step(FLOOR))


def test_a_failed_step_counts_by_what_it_held_not_by_what_it_might_have() -> None:
    size = StepSize(tokens=8192, works=4)
    assert size.failed(_step(1, 200)) and size.tokens == 100


def test_it_stays_small_for_a_while_and_grows_back_by_steps() -> None:
    size = StepSize(tokens=100, works=4)
    for plan in (_step(100), _step(50), _step(1, 1, 1, 1)):
        assert size.failed(plan)
    grown = []
    for _ in range(3 * RECOVERY):
        size.went_well()
        grown.append((size.tokens, size.works))
    assert grown[RECOVERY - 2 : RECOVERY] == [(25, 2), (50, 4)] and grown[-1] == (100, 4)
    assert size.failed(_step(100)) and size.tokens == 50
    for _ in range(RECOVERY - 1):
        size.went_well()
    assert size.failed(_step(50)) and size.tokens == 25
    size.went_well()
    assert size.tokens == 25  # a failure begins the count anew


# ── the scheduler ───────────────────────────────────────────────────────────────────────────────────────────────────
KINDS = {"full": (None, False), "window": (9, False), "recurrent": (None, True), "all": (9, True)}


def _run(bench: Bench, steps: int = 2000) -> None:
    """Until all have ended; steps that run out of memory are handed back."""
    for _ in range(steps):
        plan = bench.scheduler.next_plan()
        if plan is None:
            assert not bench.scheduler.live_ids
            bench.listen()
            return
        try:
            result = bench.runner.run(plan)
        except MemoryError:
            bench.scheduler.retry(plan, OutOfMemory("no memory"))
        else:
            bench.scheduler.accept(plan, result)
        bench.listen()
    pytest.fail(f"{bench.scheduler.live_ids} did not end within {steps} steps")


def _bench(kind: str, **changes: int) -> Bench:
    window, recurrent = KINDS[kind]
    sides = {"num_pages": 60, "window_pages": 60, "state_slots": 4, "snapshot_slots": 3, "max_prefill_tokens": 128}
    return Bench(sides | changes, window=window, recurrent=recurrent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [20, 3, 1])
def test_the_tokens_are_those_of_a_run_that_never_failed(kind: str, most: int) -> None:
    """At 3 and 1 the prefill floor is still too much: those with a prompt of more end, alone, with the error."""
    bench = _bench(kind)
    bench.runner.most_tokens = most
    for name, (length, begin) in {"a": (50, 0), "b": (50, 0), "c": (3, 300), "d": (1, 400)}.items():
        bench.submit(name, prompt(length, begin), most=9)
    _run(bench)
    assert bench.runner.failed > 2
    for name, (length, begin) in {"a": (50, 0), "b": (50, 0), "c": (3, 300), "d": (1, 400)}.items():
        last = bench.last(name)
        if length > most and most < FLOOR:
            assert isinstance(last, Failed) and last.code == "OUT_OF_MEMORY"
        else:
            assert bench.tokens(name) == oracle(prompt(length, begin), 9)
    assert bench.scheduler.pages.room == bench.scheduler.pages.capacity


def test_what_helped_once_is_kept_for_the_next_chunks() -> None:
    bench = _bench("full", num_pages=1000, max_seq_len=4000)
    bench.runner.most_tokens = 40
    bench.submit("a", prompt(40 * 32), most=2)
    _run(bench)
    assert bench.runner.failed == 2  # 128 and 64 did not go, 32 did, forty times
    assert bench.tokens("a") == oracle(prompt(40 * 32), 2)


def test_the_retry_writes_the_same_pages_again_and_takes_no_others() -> None:
    bench = _bench("full")
    bench.submit("a", prompt(40), most=2)
    first = bench.scheduler.next_plan()
    assert first is not None
    free = bench.scheduler.pages.free
    bench.scheduler.retry(first, OutOfMemory("no memory"))
    second = bench.scheduler.next_plan()
    assert second is not None and bench.scheduler.pages.free == free
    assert second.work[0].pages == first.work[0].pages
    assert (second.work[0].start, len(second.work[0].token_ids)) == (0, 20)


def test_cancelled_while_its_step_ran_out_of_memory_it_frees_everything() -> None:
    bench = _bench("all")
    bench.submit("a", prompt(40), most=2)
    bench.submit("b", prompt(5, 100), most=2)
    plan = bench.scheduler.next_plan()
    assert plan is not None
    bench.scheduler.cancel("a")
    bench.scheduler.retry(plan, OutOfMemory("no memory"))
    _run(bench)
    assert bench.tokens("b") == oracle(prompt(5, 100), 2) and "a" not in bench.said
    assert bench.scheduler.pages.room == bench.scheduler.pages.capacity


# ── the loop, with a fake and with a real model ─────────────────────────────────────────────────────────────────────
class Loop:
    """A loop on a thread of its own, and what it said."""

    def __init__(self, runner: StepRunner, sizes: Resolved, layout: Layout) -> None:
        self.said: dict[str, list[GenerationEvent]] = {}
        self.loop = EngineLoop(runner, sizes, layout, self._hear)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def _hear(self, told: Sequence[Told]) -> None:
        for name, event in told:
            self.said.setdefault(name, []).append(event)

    def answers(self, prompts: dict[str, list[int]], most: int) -> dict[str, list[int] | Failed]:
        """What each was told in the end: tokens, or why not."""
        for name, tokens in prompts.items():
            self.loop.submit(GenerateRequest(name, tuple(tokens), SamplingParams(temperature=0.0, max_tokens=most)))
        deadline = time.monotonic() + 20.0
        while not all(self._over(name) for name in prompts):
            assert time.monotonic() < deadline and self.thread.is_alive(), self.said
            time.sleep(0.002)
        return {name: self._answer(self.said.pop(name)) for name in prompts}

    def _over(self, name: str) -> bool:
        last = self.said.get(name, [None])[-1]
        return isinstance(last, Failed) or getattr(last, "finish", None) is not None

    @staticmethod
    def _answer(said: list[GenerationEvent]) -> list[int] | Failed:
        if isinstance(said[-1], Failed):
            return said[-1]
        return [token for event in said if isinstance(event, Tokens) for token in event.token_ids]

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(20.0)
        assert not self.thread.is_alive()


@pytest.fixture
def loops() -> Iterator[list[Loop]]:
    made: list[Loop] = []
    yield made
    for loop in made:
        loop.close()


def test_the_loop_outlives_a_request_that_can_never_be_computed(loops: list[Loop]) -> None:
    sizes = limits(max_prefill_tokens=64)
    runner = FakeRunner(limits=sizes, most_tokens=2)
    loops.append(loop := Loop(runner, sizes, runner.layout))
    prompts = {"long": prompt(40), "short": prompt(2, 100), "other": prompt(1, 200)}
    told = loop.answers(prompts, 5)
    failed = told["long"]
    assert isinstance(failed, Failed) and failed.code == "OUT_OF_MEMORY"
    assert failed.numbers["requests"] == 1 and failed.numbers["tokens"] <= FLOOR
    assert "--max-prefill-length" in failed.detail
    assert told["short"] == oracle(prompts["short"], 5) and told["other"] == oracle(prompts["other"], 5)
    runner.most_tokens = None
    assert loop.answers({"long": prompt(40)}, 5) == {"long": oracle(prompt(40), 5)}


def test_the_loop_shrinks_the_pool_between_steps(loops: list[Loop]) -> None:
    sizes = limits(max_prefill_tokens=64)
    runner = FakeRunner(limits=sizes, step_s=0.002, keep_plans=True)
    loops.append(loop := Loop(runner, sizes, runner.layout))
    loop.loop.resize(6)
    prompts = {"a": prompt(12), "b": prompt(12, 100), "long": prompt(40, 200)}
    told = loop.answers(prompts, 8)
    assert told["a"] == oracle(prompts["a"], 8) and told["b"] == oracle(prompts["b"], 8)
    assert isinstance(told["long"], Failed) and told["long"].numbers["pool_tokens"] == 24
    assert all(page < 6 for plan in runner.plans for work in plan.work for page in work.pages)


class Cramped:
    """The real runner on a machine with less memory: where a step is too large it computes half of it, then fails."""

    def __init__(self, built: Engine, most_tokens: int, *, really: bool = False) -> None:
        self._runner, self._most, self._really = built.runner, most_tokens, really
        self.failed = 0

    def run(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(plan)
        if plan.tokens > self._most:
            self.failed += 1
            if self._really:
                torch.empty(1 << 60, dtype=torch.uint8)  # torch's own failure, whatever its words
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried")
        return result

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        return self._runner.expert_tokens()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return engine(tiny("qwen3_moe", tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("really", [False, True])
def test_a_real_model_gives_the_same_greedy_tokens(built: Engine, loops: list[Loop], really: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    prompts = {
        f"r{n}": torch.randint(4, VOCAB, (length,), generator=draw).tolist() for n, length in enumerate((90, 37, 5))
    }
    driver = Driver(built.runner)
    expected = {name: driver.generate([driver.sequence(tokens)], 12)[0] for name, tokens in prompts.items()}
    sizes = resolved()
    cramped = Cramped(built, 24, really=really)
    loops.append(loop := Loop(cramped, sizes, Layout(sizes.page_size)))
    assert loop.answers(prompts, 12) == expected
    assert cramped.failed >= 2
