"""The scheduler under any order of events: nothing is owned twice, nothing is lost, everything ends, nobody is lied to.

First hypothesis, over long random histories; then every history up to a length, over a pool of three pages.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from freetoken.core.errors import ContextLengthExceeded, OutOfMemory, QueueFull
from freetoken.core.events import Failed, GenerationEvent, Progress, Tokens
from freetoken.core.types import FinishReason, GenerateRequest, SamplingParams
from freetoken.engine.scheduler.scheduler import Scheduler
from freetoken.engine.step import StepPlan
from freetoken.plan.choices import Resolved
from tests.fakes.runner import FakeRunner, limits, oracle

VOCAB = 5  # few, so that prefixes and eos happen by chance
EOS = 4


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class House:
    """A scheduler and its runner, with everything that was asked and said, and what must hold at any moment."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved, self.clock = resolved, Clock()
        self.scheduler = Scheduler(resolved, self.clock)
        self.runner = FakeRunner(resolved.page_size, resolved.num_pages, VOCAB)
        self.asked: dict[str, GenerateRequest] = {}
        self.said: dict[str, list[GenerationEvent]] = {}
        self.cancelled: set[str] = set()
        self.plan: StepPlan | None = None  # the step in flight

    def submit(self, prompt: list[int], most: int) -> None:
        name = f"r{len(self.asked)}"
        asked = GenerateRequest(name, tuple(prompt), SamplingParams(max_tokens=most, presence_penalty=1.0), (EOS,))
        try:
            self.scheduler.submit(asked)
        except ContextLengthExceeded:
            too_long = len(prompt) >= self.resolved.max_seq_len
            pages = -(-len(prompt) // self.resolved.page_size) + 1
            assert too_long or pages > self.resolved.num_pages
        except QueueFull:
            assert self.scheduler.queued >= self.resolved.max_queued
        else:
            self.asked[name] = asked

    def cancel(self, name: str) -> None:
        if self.scheduler.cancel(name):
            self.cancelled.add(name)

    def begin(self) -> None:
        self.plan = self.scheduler.next_plan()
        if self.plan is not None:
            names = [work.request_id for work in self.plan.work]
            assert len(set(names)) == len(names) <= self.resolved.max_running_requests
            prefill = sum(len(work.token_ids) for work in self.plan.work if len(work.token_ids) > 1)
            assert prefill <= self.resolved.max_prefill_tokens
        self.listen()

    def end(self, fails: bool = False) -> None:
        assert self.plan is not None
        if fails:
            self.scheduler.abandon(OutOfMemory("no memory"))
        else:
            self.scheduler.accept(self.plan, self.runner.run(self.plan))  # raises PageLie where pages are mixed up
        self.plan = None
        self.listen()

    def listen(self) -> None:
        for name, event in self.scheduler.take_events():
            assert name not in self.cancelled, "a cancelled request is not heard of again"
            self.said.setdefault(name, []).append(event)

    def check(self) -> None:
        """Conservation and single ownership, from the page tables themselves."""
        pages, pool, tree = self.scheduler.pages, self.scheduler.pages._pool, self.scheduler.pages._tree
        holders = {id(r): r for r in [*self.scheduler._running, *self.scheduler._flying.values()]}.values()
        users = Counter(page for request in holders for page in request.pages)
        kept = list(_pages_of(tree._root))
        assert [pool.users(page) for page in range(pages.total)] == [users[page] for page in range(pages.total)]
        assert len(set(kept)) == len(kept) == len(tree)
        assert pages.free + len({*users, *kept}) == pages.total
        assert pages.cached == len({*kept} - {*users})
        for request in holders:
            assert len(set(request.pages)) == len(request.pages)
            assert request.computed <= len(request.pages) * self.resolved.page_size
        assert self.scheduler.running <= self.resolved.max_running_requests
        assert all(not request.pages for request in self.scheduler._waiting)
        for own, other in itertools.combinations(holders, 2):
            shared = {*own.pages} & {*other.pages}
            assert shared <= {*kept}, "only what the cache holds may be shared"

    def finish(self) -> None:
        """Everything ends within the steps that its tokens need, and as it should."""
        if self.plan is not None:
            self.end()
        tokens = sum(len(asked.token_ids) + self.resolved.max_seq_len for asked in self.asked.values())
        for _ in range(10 * tokens + 10):
            self.begin()
            if self.plan is None:
                break
            self.end()
            self.check()
        assert not self.scheduler.live_ids
        assert self.scheduler.pages.available == self.scheduler.pages.total
        for name, asked in self.asked.items():
            if name not in self.cancelled:
                self._check_story(asked, self.said[name])

    def _check_story(self, asked: GenerateRequest, said: list[GenerationEvent]) -> None:
        *before, last = said
        assert not any(isinstance(event, Failed) or getattr(event, "finish", None) for event in before), "one end only"
        spoken = [event for event in said if isinstance(event, Tokens)]
        got = [token for event in spoken for token in event.token_ids]
        right = oracle(asked.token_ids, len(got) + 1, VOCAB)
        assert got == right[:-1] and EOS not in got
        first = next((place for place, event in enumerate(said) if isinstance(event, Tokens)), len(said))
        assert not any(isinstance(event, Progress) for event in said[first:])
        if spoken and not (len(spoken) == 1 and spoken[0].limited_by):
            assert [event.cached is not None for event in spoken] == [True] + [False] * (len(spoken) - 1)
            assert 0 <= (spoken[0].cached or 0) < len(asked.token_ids)
        if isinstance(last, Failed):
            assert last.code in ("OUT_OF_MEMORY", "QUEUE_TIMEOUT")
        else:
            assert isinstance(last, Tokens)
            self._check_end(asked, last, len(got), right[-1])

    def _check_end(self, asked: GenerateRequest, last: Tokens, count: int, following: int) -> None:
        if last.finish is FinishReason.STOP:
            assert following == EOS
        elif last.limited_by == "kv_pool":
            pool = self.resolved.num_pages * self.resolved.page_size
            assert len(asked.token_ids) + count >= min(pool, self.resolved.max_seq_len)
        else:
            assert last.finish is FinishReason.LENGTH
            assert count == asked.sampling.max_tokens or len(asked.token_ids) + count == self.resolved.max_seq_len


def _pages_of(node: object) -> list[int]:
    found = []
    for child in node.children.values():  # type: ignore[attr-defined]
        assert child.parent is node
        found += [child.page, *_pages_of(child)]
    return found


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house = House(
            limits(
                page_size=2,
                num_pages=7,
                max_running_requests=3,
                max_prefill_tokens=4,
                max_seq_len=20,  # more than the pool
                max_queued=3,
                queue_deadline_s=50.0,
            )
        )

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), most=st.integers(1, 12))
    def submit(self, prompt: list[int], most: int) -> None:
        self.house.submit(prompt, most)

    @rule(data=st.data())
    @precondition(lambda self: self.house.asked)
    def cancel(self, data: st.DataObject) -> None:
        self.house.cancel(data.draw(st.sampled_from(sorted(self.house.asked))))

    @rule()
    @precondition(lambda self: self.house.plan is None)
    def begin(self) -> None:
        self.house.begin()

    @rule()
    @precondition(lambda self: self.house.plan is not None)
    def end(self) -> None:
        self.house.end()

    @rule()
    @precondition(lambda self: self.house.plan is None)
    def step(self) -> None:
        self.house.begin()
        if self.house.plan is not None:
            self.house.end()

    @rule()
    @precondition(lambda self: self.house.plan is not None)
    def fail(self) -> None:
        self.house.end(fails=True)

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.house.clock.now += seconds
        self.house.scheduler.expire()
        self.house.listen()

    @invariant()
    def holds(self) -> None:
        self.house.check()

    def teardown(self) -> None:
        self.house.finish()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_long_random_histories() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Machine, settings=settings(max_examples=200, stateful_step_count=60, deadline=None))


MOVES = {
    "short": lambda house: house.submit([0], 4),
    "long": lambda house: house.submit([0, 0, 1], 6),
    "cancel": lambda house: house.cancel(max(house.scheduler.live_ids, default="")),
    "begin": lambda house: house.end() if house.plan else house.begin(),
    "fail": lambda house: house.end(fails=True) if house.plan else None,
}


def every_history(length: int) -> int:
    count = 0
    for history in itertools.product(MOVES, repeat=length):
        if history[0] not in ("short", "long"):
            continue  # nothing has happened yet
        house = House(
            limits(page_size=2, num_pages=3, max_running_requests=2, max_prefill_tokens=2, max_seq_len=6, max_queued=2)
        )
        for move in history:
            MOVES[move](house)
            house.check()
        house.finish()
        count += 1
    return count


def test_every_short_history_over_three_pages() -> None:
    assert every_history(5) == 2 * 5**4


@pytest.mark.slow
def test_every_longer_history_over_three_pages() -> None:
    assert every_history(6) == 2 * 5**5
