"""A runner without a model: the next token is a hash of all tokens before it, and pages are checked as they are read.

It writes the token id of every position into the page tables it is given (of the full pool and of the window's), keeps
the tokens that each recurrent state has seen, and before it samples reads all of it back: a page, state or snapshot
that is shared, freed or reused wrongly shows as PageLie, not as a strange answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from freetoken.core.types import TokenLogprob
from freetoken.engine.paging.rules import Layout
from freetoken.engine.step import Sampled, StepPlan, StepResult, Work
from freetoken.plan.choices import Resolved

EMPTY, RUBBISH = -1, -2  # what a page holds that was never written, or by a step that failed


class PageLie(Exception):
    """A page does not hold the prefix that its page table says it holds."""


def next_token(history: Sequence[int], vocab: int = 1000) -> int:
    """The oracle: which token follows `history`."""
    state = 0x811C9DC5
    for token in history:
        state = ((state ^ token) * 0x01000193) & 0xFFFFFFFF
    return state % vocab


def oracle(prompt: Sequence[int], count: int, vocab: int = 1000) -> list[int]:
    """The first `count` tokens that follow `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


def limits(**changes: object) -> Resolved:
    """Small limits, with `changes`."""
    values: dict[str, object] = {
        "device": "cpu",
        "weight_dtype": "float32",
        "page_size": 4,
        "num_pages": 64,
        "max_running_requests": 4,
        "max_prefill_tokens": 16,
        "max_seq_len": 256,
        "max_queued": 64,
        "queue_deadline_s": 600.0,
        "threads": 1,
    }
    return Resolved(**(values | changes))  # type: ignore[arg-type]


@dataclass
class FakeRunner:
    """`layout` and `limits` say which pools there are. With `most_tokens`, a step of more runs out of memory, after
    it has written rubbish wherever it may write, with all states put back."""

    layout: Layout = field(default_factory=lambda: Layout(4))
    limits: Resolved = field(default_factory=limits)
    vocab: int = 1000
    step_s: float = 0.0
    errors: dict[int, Exception] = field(default_factory=dict)  # step number -> what it raises
    most_tokens: int | None = None
    steps: int = 0
    computed: int = 0
    failed: int = 0  # steps that ran out of memory
    plans: list[StepPlan] = field(default_factory=list)
    keep_plans: bool = False

    def __post_init__(self) -> None:
        size, limits = self.layout.page_size, self.limits
        self.pages = [[EMPTY] * size for _ in range(limits.num_pages)]
        self.window = [[EMPTY] * size for _ in range(limits.window_pages)]
        self.states: list[tuple[int, ...]] = [()] * limits.state_slots  # what a state has seen
        self.snapshots: list[tuple[int, ...]] = [()] * limits.snapshot_slots

    def run(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.keep_plans:
            self.plans.append(plan)
        if self.step_s:
            time.sleep(self.step_s)
        if error := self.errors.get(self.steps):
            raise error
        if self.most_tokens is not None and plan.tokens > self.most_tokens:
            self.run_out(plan)
        for work in plan.work:
            self._write(work)
            self._keep_state(work)
        return StepResult({work.request_id: self._sample(work) for work in plan.work if work.sample}, 1)

    def run_out(self, plan: StepPlan) -> None:
        """Raises MemoryError in the middle of `plan`: what it writes is rubbish by then, and states are put back."""
        self.failed += 1
        for work in plan.work:
            self._write(replace(work, token_ids=(RUBBISH,) * len(work.token_ids)))
            if work.state is not None and work.state.saving is not None:
                self.snapshots[work.state.saving] = (RUBBISH,)
        raise MemoryError

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        return ((self.computed, 0), (0, self.computed))

    def _write(self, work: Work) -> None:
        self.computed += len(work.token_ids)
        size = self.layout.page_size
        for position, token in enumerate(work.token_ids, start=work.start):
            page, place = divmod(position, size)
            self.pages[work.pages[page]][place] = token
            if self.layout.window is not None:
                self.window[work.window[page - work.slid]][place] = token

    def _keep_state(self, work: Work) -> None:
        if work.state is None:
            return
        before = () if work.start == 0 else self.states[work.state.slot]
        if work.state.source is not None:
            before = self.snapshots[work.state.source]
        if len(before) != work.start:
            raise PageLie(f"{work.request_id}: its state has seen {len(before)} tokens, not {work.start}")
        self.states[work.state.slot] = before + work.token_ids
        if work.state.saving is not None:
            self.snapshots[work.state.saving] = self.states[work.state.slot]

    def _sample(self, work: Work) -> Sampled:
        size = self.layout.page_size
        prefix = [self.pages[work.pages[i // size]][i % size] for i in range(work.end)]
        if prefix[work.start :] != list(work.token_ids) or not {EMPTY, RUBBISH}.isdisjoint(prefix):
            raise PageLie(f"{work.request_id}: pages {work.pages} hold {prefix}, not ...{work.token_ids}")
        if work.history and tuple(prefix) != work.history:
            raise PageLie(f"{work.request_id}: pages hold {prefix}, the history is {work.history}")
        self._check_sides(work, prefix)
        token = next_token(prefix, self.vocab)
        logprob = None if work.sampling.logprobs is None else TokenLogprob(token, -0.5, ((token, -0.5),))
        return Sampled(token, logprob)

    def _check_sides(self, work: Work, prefix: list[int]) -> None:
        """The window of the first position and all after it, and the state, hold the same prefix."""
        size = self.layout.page_size
        if self.layout.window is not None:
            first = max(0, work.start - self.layout.window + 1)
            seen = [self.window[work.window[i // size - work.slid]][i % size] for i in range(first, work.end)]
            if seen != prefix[first:] or first // size < work.slid:
                raise PageLie(f"{work.request_id}: window pages {work.window} hold {seen}, not {prefix[first:]}")
        if self.layout.recurrent and (work.state is None or self.states[work.state.slot] != tuple(prefix)):
            raise PageLie(f"{work.request_id}: its state has not seen {prefix}")
