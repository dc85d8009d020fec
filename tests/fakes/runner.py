"""A runner without a model: the next token is a hash of all tokens before it, and pages are checked as they are read.

It writes the token id of every position into the page table it is given, and before it samples reads the whole prefix
back: a page shared, freed or reused wrongly shows as PageLie, not as a strange answer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from freetoken.core.types import TokenLogprob
from freetoken.engine.step import Sampled, StepPlan, StepResult, Work
from freetoken.plan.choices import Resolved


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
    page_size: int = 4
    num_pages: int = 64
    vocab: int = 1000
    step_s: float = 0.0
    errors: dict[int, Exception] = field(default_factory=dict)  # step number -> what it raises
    steps: int = 0
    computed: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    keep_plans: bool = False

    def __post_init__(self) -> None:
        self._pages: list[list[int | None]] = [[None] * self.page_size for _ in range(self.num_pages)]

    def run(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        if self.keep_plans:
            self.plans.append(plan)
        if self.step_s:
            time.sleep(self.step_s)
        if error := self.errors.get(self.steps):
            raise error
        for work in plan.work:
            self._write(work)
        return StepResult({work.request_id: self._sample(work) for work in plan.work if work.sample}, 1)

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        return ((self.computed, 0), (0, self.computed))

    def _write(self, work: Work) -> None:
        self.computed += len(work.token_ids)
        for position, token in enumerate(work.token_ids, start=work.start):
            self._pages[work.pages[position // self.page_size]][position % self.page_size] = token

    def _sample(self, work: Work) -> Sampled:
        prefix = [self._pages[work.pages[i // self.page_size]][i % self.page_size] for i in range(work.end)]
        if prefix[work.start :] != list(work.token_ids) or None in prefix:
            raise PageLie(f"{work.request_id}: pages {work.pages} hold {prefix}, not ...{work.token_ids}")
        if work.history and tuple(prefix) != work.history:
            raise PageLie(f"{work.request_id}: pages hold {prefix}, the history is {work.history}")
        token = next_token(prefix, self.vocab)  # type: ignore[arg-type]
        logprob = None if work.sampling.logprobs is None else TokenLogprob(token, -0.5, ((token, -0.5),))
        return Sampled(token, logprob)
