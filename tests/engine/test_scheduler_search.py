"""Every state that small pools can reach, and from each of them the way to the end. A proof, as far as it is small.

Breadth first over submit, step begun, step done, step out of memory, cancel (also in mid-step), shrink and grow. In
each state all that House checks holds; and when nothing more comes, each leads to the end within a number of steps:
what `begin` and `end` lead to is a state that was searched too, so the longest way is counted over the graph.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from freetoken.core.types import GenerateRequest, SamplingParams
from freetoken.engine.paging.blocks import PagePool
from freetoken.engine.paging.rules import Layout
from freetoken.engine.paging.shelf import Shelf
from freetoken.engine.scheduler import retry
from freetoken.engine.scheduler.scheduler import Scheduler
from freetoken.engine.step import Request
from freetoken.plan.choices import Resolved
from tests.fakes.house import House, nodes
from tests.fakes.runner import limits

State = tuple[Any, ...]
Asked = tuple[tuple[int, ...], int]  # prompt, most tokens of output


@dataclass(frozen=True)
class Case:
    """`events` bounds how often along one way each may happen: out of memory, cancel, resize."""

    layout: Layout
    sizes: dict[str, int]
    requests: tuple[Asked, ...]
    events: tuple[int, int, int] = (1, 1, 2)
    shrunk: int = 2


class Searched(House):
    """A House that can be copied and told apart; it knows which events it has left."""

    def __init__(self, case: Case) -> None:
        fixed = {"page_size": case.layout.page_size, "max_seq_len": 12, "max_queued": 4}
        super().__init__(limits(**(fixed | case.sizes)), case.layout)
        self.left = list(case.events)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "said": {}}  # many ways lead here: the state machine checks what was said

    def moves(self, case: Case) -> Iterator[tuple[str, Callable[[Searched], None]]]:
        """What may happen here. The first, where nobody is done, is the step that the scheduler itself would take."""
        if self.plan is not None:
            yield "end", Searched.end
            if self.left[0]:
                yield "runs out", lambda house: house.spend(0, lambda: house.end(runs_out=True))
        elif self.scheduler.live_ids:
            yield "begin", Searched.begin
        if len(self.asked) < len(case.requests):
            yield "submit", lambda house: house.submit(*case.requests[len(house.asked)])
        for name in self.scheduler.live_ids if self.left[1] else ():
            yield f"cancel {name}", lambda house, name=name: house.spend(1, lambda: house.cancel(name))  # type: ignore[misc]
        if self.plan is None and self.left[2]:
            size = case.shrunk if self.scheduler.pages.total == self.resolved.num_pages else self.resolved.num_pages
            yield f"resize {size}", lambda house: house.spend(2, lambda: house.resize(size))

    def spend(self, event: int, happens: Callable[[], None]) -> None:
        self.left[event] -= 1
        happens()

    def key(self) -> State:
        """Two houses with the same key behave the same for ever."""
        scheduler, pages = self.scheduler, self.scheduler.pages
        shelves = [side.shelf for side in pages._sides]
        slots = [pages._states.slots] if pages._states is not None else []
        return (
            len(self.asked),
            tuple(self.left),
            tuple(map(_request, scheduler._running)),
            tuple(map(_request, scheduler._queue)),
            tuple((_request(request), scheduler._is_live(request)) for request in scheduler._flying.values()),
            None if self.plan is None else tuple((w.request_id, w.start, w.end) for w in self.plan.work),
            _tree(scheduler),
            tuple(map(_pool, [pages._pool, *slots])),
            tuple(map(_shelf, shelves)),
            (scheduler._size.tokens, scheduler._size.works, scheduler._size._good),
            scheduler._refused_at == (pages.returns, scheduler._queue.changes),
        )


_constants: dict[int, object] = {}


def _constant(number: int) -> object:
    return _constants[number]


class _Packer(pickle.Pickler):
    """Packs a house, but for what never changes: that is kept by reference."""

    def reducer_override(self, thing: object) -> Any:
        if not isinstance(thing, _CONSTANT):
            return NotImplemented
        _constants[id(thing)] = thing
        return _constant, (id(thing),)


_CONSTANT = (Resolved, Layout, GenerateRequest, SamplingParams)


def pack(house: Searched) -> bytes:
    packed = io.BytesIO()
    _Packer(packed, 5).dump(house)
    return packed.getvalue()


def _request(request: Request) -> State:
    held = tuple(request.pages), tuple(request.window), request.slid, request.state, request.source, request.saving
    where = request.computed, request.cached, len(request.token_ids), request.preempted, request.overtaken
    return request.id, where, held


def _pool(pool: PagePool) -> State:
    return pool.total, bytes(pool._map), tuple(pool._users), bytes(pool._kept), pool._cursor


def _shelf(shelf: Shelf) -> State:
    return tuple(shelf._entries.items()), _pool(shelf.pool)


def _tree(scheduler: Scheduler) -> State:
    """Pages, what they hold and hang on, in the order in which they would be evicted."""
    found: list[Any] = sorted(nodes(scheduler.pages._tree), key=lambda node: node.used)  # type: ignore[attr-defined]
    return tuple((node.page, node.parent.page, node.key) for node in found)


def search(case: Case) -> tuple[int, int]:
    """Check every state that can be reached. Returns how many there are, and the longest way to an end in steps."""
    start = Searched(case)
    seen: dict[State, State | None] = {start.key(): None}  # to the state that the scheduler's own next step leads to
    todo = deque([(start.key(), pack(start))])
    while todo:
        key, packed = todo.popleft()
        house: Searched = pickle.loads(packed)
        for name, move in list(house.moves(case)):
            then: Searched = pickle.loads(packed)
            move(then)
            next_key = then.key()
            if name in ("begin", "end"):
                assert next_key != key, "nothing can run, and somebody waits"
                seen[key] = next_key
            if next_key not in seen:
                then.check()
                seen[next_key] = None
                todo.append((next_key, pack(then)))
                if not then.scheduler.live_ids and then.plan is None:
                    assert then.scheduler.pages.room == then.scheduler.pages.capacity
    return len(seen), _longest(seen)


def _longest(following: dict[State, State | None]) -> int:
    """Steps of the longest way to an end; a way that comes back to itself never ends."""
    length: dict[State, int] = {key: 0 for key, then in following.items() if then is None}
    for key in following:
        way: list[State] = []
        on_it: set[State] = set()
        while key not in length:
            assert key not in on_it, "a way that never ends"
            way.append(key)
            on_it.add(key)
            key = following[key]  # type: ignore[assignment]
        length |= {passed: distance for distance, passed in enumerate(reversed(way), start=length[key] + 1)}
    return max(length.values())


SHARING: tuple[Asked, ...] = (((0, 1, 0), 3), ((0, 1, 0, 1, 1), 1), ((0, 1), 5), ((1,), 1))
SHORT: tuple[Asked, ...] = (((0, 1), 3), ((0, 1, 0), 1), ((1,), 4))
SIZES = {"num_pages": 4, "max_running_requests": 2, "max_prefill_tokens": 4}
SIDES = SIZES | {"window_pages": 3, "state_slots": 1, "snapshot_slots": 2}
QUICK = {
    "full": Case(Layout(2), SIZES, SHARING[:3]),
    "window": Case(Layout(2, window=4), SIDES | {"window_pages": 4}, SHARING[:3], (1, 1, 1)),
    "recurrent": Case(Layout(2, recurrent=True), SIDES, SHARING[:3]),
    "all": Case(Layout(2, window=3, recurrent=True), SIDES | {"state_slots": 2}, SHARING[:3], (1, 1, 1)),
}
DEEP = {
    "full": Case(Layout(2), SIZES | {"max_running_requests": 3}, SHARING, (2, 1, 1)),
    "page of one": Case(
        Layout(1), {"num_pages": 5, "max_running_requests": 2, "max_prefill_tokens": 2}, SHORT, (2, 1, 2), shrunk=3
    ),
    "window": Case(Layout(2, window=3), SIDES, SHARING, (2, 1, 1)),
    "recurrent": Case(Layout(2, recurrent=True), SIDES | {"state_slots": 2}, SHARING, (1, 1, 1)),
    "all": Case(Layout(2, window=3, recurrent=True), SIDES | {"state_slots": 2}, SHARING, (1, 1, 1)),
}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps here are small, and so must be what a retry does to them."""
    monkeypatch.setattr(retry, "FLOOR", 1)
    monkeypatch.setattr(retry, "RECOVERY", 2)


@pytest.mark.parametrize("name", QUICK)
def test_every_state_of_small_pools_is_sound_and_ends(name: str) -> None:
    states, steps = search(QUICK[name])
    assert states > 1500 and steps < 40


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_every_state_of_larger_histories_is_sound_and_ends(name: str) -> None:
    states, steps = search(DEEP[name])
    assert states > 4000 and steps < 60
