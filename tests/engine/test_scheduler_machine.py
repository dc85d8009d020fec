"""The scheduler under long random histories: whatever comes in whatever order, all that House checks holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from freetoken.engine.paging.rules import Layout
from freetoken.engine.scheduler import retry
from tests.fakes.house import House
from tests.fakes.runner import limits

PAGES = 7
LAYOUTS = {
    "full": Layout(2),
    "window": Layout(2, window=3),
    "recurrent": Layout(2, recurrent=True),
    "all": Layout(2, window=4, recurrent=True),
}


class Machine(RuleBasedStateMachine):
    layout = LAYOUTS["full"]

    def __init__(self) -> None:
        super().__init__()
        sides: dict[str, Any] = {"window_pages": 5, "state_slots": 2, "snapshot_slots": 2}
        sizes = limits(
            page_size=2,
            num_pages=PAGES,
            max_running_requests=3,
            max_prefill_tokens=4,
            max_seq_len=20,  # more than the pool
            max_queued=3,
            queue_deadline_s=50.0,
            **sides,
        )
        self.house = House(sizes, self.layout)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14), most=st.integers(1, 12))
    def submit(self, prompt: list[int], most: int) -> None:
        self.house.submit(prompt, most)

    @rule(data=st.data())
    @precondition(lambda self: self.house.asked)
    def cancel(self, data: st.DataObject) -> None:
        self.house.cancel(data.draw(st.sampled_from(sorted(self.house.asked))))

    @rule()
    @precondition(lambda self: self.house.asked)
    def cancel_all(self) -> None:
        self.house.cancel_all()

    @rule()
    @precondition(lambda self: self.house.plan is None)
    def begin(self) -> None:
        self.house.begin()

    @rule()
    @precondition(lambda self: self.house.plan is not None)
    def end(self) -> None:
        self.house.end()

    @rule(steps=st.integers(1, 4))
    @precondition(lambda self: self.house.plan is None)
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.house.begin()
            if self.house.plan is not None:
                self.house.end()

    @rule()
    @precondition(lambda self: self.house.plan is not None)
    def run_out_of_memory(self) -> None:
        self.house.end(runs_out=True)

    @rule(pages=st.integers(1, PAGES))
    @precondition(lambda self: self.house.plan is None)
    def resize(self, pages: int) -> None:
        self.house.resize(pages)

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.house.expire(seconds)

    @invariant()
    def holds(self) -> None:
        self.house.check()

    def teardown(self) -> None:
        self.house.finish()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps here are small, and so must be what a retry does to them."""
    monkeypatch.setattr(retry, "FLOOR", 1)
    monkeypatch.setattr(retry, "RECOVERY", 3)


def run(layout: str, examples: int, steps: int) -> None:
    machine = type(f"Machine_{layout}", (Machine,), {"layout": LAYOUTS[layout]})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_histories(layout: str) -> None:
    run(layout, examples=25, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_random_histories(layout: str) -> None:
    run(layout, examples=120, steps=60)
