"""A scheduler and its runner on a bench: submit, step, and everything that callers were told, by request."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from freetoken.core.events import GenerationEvent, Tokens
from freetoken.core.types import GenerateRequest, SamplingParams
from freetoken.engine.paging.rules import Layout
from freetoken.engine.scheduler.scheduler import Scheduler
from freetoken.engine.step import StepPlan
from tests.fakes.runner import FakeRunner, limits


@dataclass
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@dataclass
class Bench:
    """A scheduler, its runner, and everything it said, by request."""

    changes: dict[str, object] = field(default_factory=dict)
    vocab: int = 1000
    window: int | None = None
    recurrent: bool = False

    def __post_init__(self) -> None:
        resolved = limits(**self.changes)
        layout = Layout(resolved.page_size, self.window, self.recurrent)
        self.clock = Clock()
        self.scheduler = Scheduler(resolved, layout, self.clock)
        self.runner = FakeRunner(layout, resolved, self.vocab, keep_plans=True)
        self.said: dict[str, list[GenerationEvent]] = {}

    def submit(self, name: str, prompt: list[int], most: int | None = 8, **more: object) -> None:
        eos = tuple(more.pop("eos_ids", ()))  # type: ignore[arg-type]
        deadline = more.pop("deadline_ms", None)
        sampling = SamplingParams(max_tokens=most, **more)  # type: ignore[arg-type]
        self.scheduler.submit(GenerateRequest(name, tuple(prompt), sampling, eos, deadline))  # type: ignore[arg-type]

    def step(self) -> StepPlan | None:
        plan = self.scheduler.next_plan()
        if plan is not None:
            self.scheduler.accept(plan, self.runner.run(plan))
        self.listen()
        return plan

    def listen(self) -> None:
        for name, event in self.scheduler.take_events():
            self.said.setdefault(name, []).append(event)

    def finish(self, steps: int = 2000) -> None:
        for _ in range(steps):
            if self.step() is None and not self.scheduler.live_ids:
                return
        pytest.fail(f"{self.scheduler.live_ids} did not end within {steps} steps")

    def tokens(self, name: str) -> list[int]:
        return [token for event in self.said[name] if isinstance(event, Tokens) for token in event.token_ids]

    def last(self, name: str) -> GenerationEvent:
        return self.said[name][-1]

    def first_tokens(self, name: str) -> Tokens:
        return next(event for event in self.said[name] if isinstance(event, Tokens))

    def all_pages_back(self) -> bool:
        pages = self.scheduler.pages
        return pages.available == pages.total


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))
