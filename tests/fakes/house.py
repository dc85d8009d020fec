"""A scheduler and its runner under any order of events, and what must hold at any moment of it.

Nothing is owned twice, nothing is lost, and every page, state and snapshot holds what its owner believes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

from freetoken.core.errors import ContextLengthExceeded, OutOfMemory, QueueFull
from freetoken.core.events import Failed, GenerationEvent, Progress, Tokens
from freetoken.core.types import FinishReason, GenerateRequest, SamplingParams
from freetoken.engine.paging.blocks import PagePool
from freetoken.engine.paging.prefix import PrefixTree
from freetoken.engine.paging.rules import Layout
from freetoken.engine.paging.shelf import Shelf
from freetoken.engine.scheduler.scheduler import Scheduler
from freetoken.engine.step import Request, StepPlan
from freetoken.plan.choices import Resolved
from tests.fakes.runner import FakeRunner, oracle

VOCAB = 5  # few, so that prefixes and eos happen by chance
EOS = 4


@cache
def _follow(prompt: tuple[int, ...], count: int) -> list[int]:
    return oracle(prompt, count, VOCAB)


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class House:
    """`asked` and `said` are all that went in and came out, by request."""

    def __init__(self, resolved: Resolved, layout: Layout | None = None) -> None:
        self.resolved, self.clock = resolved, Clock()
        self.layout = layout or Layout(resolved.page_size)
        self.scheduler = Scheduler(resolved, self.layout, self.clock)
        self.runner = FakeRunner(self.layout, resolved, VOCAB)
        self.asked: dict[str, GenerateRequest] = {}
        self.said: dict[str, list[GenerationEvent]] = {}
        self.cancelled: set[str] = set()
        self.smallest = resolved.num_pages  # pages that the full pool ever had
        self.plan: StepPlan | None = None  # the step in flight

    # ── what may happen ─────────────────────────────────────────────────────────────────────────────────────────────
    def submit(self, prompt: Iterable[int], most: int) -> None:
        tokens = tuple(prompt)
        asked = GenerateRequest(
            f"r{len(self.asked)}", tokens, SamplingParams(max_tokens=most, presence_penalty=1.0), (EOS,)
        )
        try:
            self.scheduler.submit(asked)
        except ContextLengthExceeded:
            assert len(tokens) >= self.resolved.max_seq_len or not self.can_hold(len(tokens))
        except QueueFull:
            assert self.scheduler.queued >= self.resolved.max_queued
        else:
            assert self.can_hold(len(tokens))
            self.asked[asked.id] = asked

    def can_hold(self, tokens: int) -> bool:
        """Counted by hand: the prompt and a page of output; in the window pool what a piece of a page sees at worst."""
        size, window = self.resolved.page_size, self.layout.window
        pages = -(-tokens // size) + 1
        fits = pages <= self.scheduler.pages.total
        if window is not None:
            touched = max(
                len({p // size for p in range(at - window + 1, at + size)}) for at in range(window, window + size)
            )
            fits = fits and min(pages, touched) <= self.resolved.window_pages
        return fits and (not self.layout.recurrent or self.resolved.state_slots > 0)

    def cancel(self, name: str) -> None:
        if self.scheduler.cancel(name):
            self.cancelled.add(name)

    def cancel_all(self) -> None:
        self.scheduler.cancel_all()
        self.listen()
        assert not self.scheduler.live_ids

    def begin(self) -> None:
        self.plan = self.scheduler.next_plan()
        if self.plan is not None:
            names = [work.request_id for work in self.plan.work]
            assert len(set(names)) == len(names) <= self.resolved.max_running_requests
            prefill = sum(len(work.token_ids) for work in self.plan.work if len(work.token_ids) > 1)
            assert prefill <= self.resolved.max_prefill_tokens
        self.listen()

    def end(self, runs_out: bool = False) -> None:
        """The step in flight is done, or runs out of memory."""
        assert self.plan is not None
        if runs_out:
            try:
                self.runner.run_out(self.plan)
            except MemoryError:
                self.scheduler.retry(self.plan, OutOfMemory("no memory"))
        else:
            self.scheduler.accept(self.plan, self.runner.run(self.plan))  # raises PageLie where pages are mixed up
        self.plan = None
        self.listen()

    def resize(self, pages: int) -> None:
        self.smallest = min(self.smallest, pages)
        self.scheduler.resize(pages)
        self.listen()

    def expire(self, seconds: float) -> None:
        self.clock.now += seconds
        self.scheduler.expire()
        self.listen()

    def listen(self) -> None:
        for name, event in self.scheduler.take_events():
            assert name not in self.cancelled, "a cancelled request is not heard of again"
            self.said.setdefault(name, []).append(event)

    # ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────────
    def holders(self) -> list[Request]:
        """Those that hold anything: they run, or were cancelled while their step is in flight."""
        return list({id(r): r for r in [*self.scheduler._running, *self.scheduler._flying.values()]}.values())

    def check(self) -> None:
        """From the tables themselves, not from the counters: those are compared with them."""
        scheduler, pages, holders = self.scheduler, self.scheduler.pages, self.holders()
        kept = {node.page: node for node in nodes(pages._tree)}
        check_pool(pages._pool, [request.pages for request in holders], kept)
        assert len(kept) == len(pages._tree)
        if pages._window is not None:
            check_shelf(pages._window.shelf, [request.window for request in holders], kept)
        if pages._states is not None:
            check_pool(pages._states.slots, [_given(request.state) for request in holders], ())
            taken = [_given(request.source) + _given(request.saving) for request in holders]
            check_shelf(pages._states.shelf, taken, kept)
            assert all(request.state is not None for request in holders)
        assert scheduler.running <= self.resolved.max_running_requests
        for request in scheduler._queue:
            assert not (request.pages or request.window or request.computed)
            assert request.state is request.source is request.saving is None
        self._check_contents(holders)

    def _check_contents(self, holders: list[Request]) -> None:
        pages, runner, size = self.scheduler.pages, self.runner, self.resolved.page_size
        for node in nodes(pages._tree):
            tokens = path(node)
            assert runner.pages[node.page] == tokens[-size:]
            if pages._window is not None and (entry := pages._window.shelf.get(node.page)) is not None:
                assert runner.window[entry] == tokens[-size:]
            if pages._states is not None and (entry := pages._states.shelf.get(node.page)) is not None:
                assert runner.snapshots[entry] == tuple(tokens)
        for request in holders:
            prefix = request.token_ids[: request.computed]
            assert [runner.pages[request.pages[i // size]][i % size] for i in range(request.computed)] == prefix
            assert request.token_ids[request.prompt_len :] == _follow(
                tuple(request.token_ids[: request.prompt_len]), request.output_len
            )
            if self.layout.window is not None:
                first = max(0, request.computed - self.layout.window + 1)
                assert request.slid <= first // size
                window = [
                    runner.window[request.window[i // size - request.slid]][i % size] for i in range(first, len(prefix))
                ]
                assert window == prefix[first:]
            if self.layout.recurrent and prefix:
                assert request.state is not None
                state = runner.states[request.state] if request.source is None else runner.snapshots[request.source]
                assert state == tuple(prefix)

    # ── how it ends ─────────────────────────────────────────────────────────────────────────────────────────────────
    def finish(self) -> None:
        """When nothing more comes, everything ends within the steps that its tokens need, and as it should."""
        if self.plan is not None:
            self.end()
        tokens = sum(len(asked.token_ids) + self.resolved.max_seq_len for asked in self.asked.values())
        for _ in range(10 * tokens + 10):
            self.begin()
            if self.plan is None:
                break
            self.end()
            self.check()
        self.check_over()

    def check_over(self) -> None:
        """Nobody is left, nothing is held, and all were told what they should."""
        assert not self.scheduler.live_ids
        assert self.scheduler.pages.room == self.scheduler.pages.capacity
        for name, asked in self.asked.items():
            if name not in self.cancelled:
                self._check_story(asked, self.said[name])

    def _check_story(self, asked: GenerateRequest, said: list[GenerationEvent]) -> None:
        *before, last = said
        assert not any(isinstance(event, Failed) or getattr(event, "finish", None) for event in before), "one end only"
        spoken = [event for event in said if isinstance(event, Tokens)]
        got = [token for event in spoken for token in event.token_ids]
        right = _follow(asked.token_ids, len(got) + 1)
        assert got == right[:-1] and EOS not in got
        first = next((place for place, event in enumerate(said) if isinstance(event, Tokens)), len(said))
        assert not any(isinstance(event, Progress) for event in said[first:])
        ended_early = isinstance(last, Tokens) and (last.limited_by or last.finish is FinishReason.CANCELLED)
        if spoken and not (len(spoken) == 1 and ended_early):
            assert [event.cached is not None for event in spoken] == [True] + [False] * (len(spoken) - 1)
            assert 0 <= (spoken[0].cached or 0) < len(asked.token_ids)
        if isinstance(last, Failed):
            assert last.code in ("OUT_OF_MEMORY", "QUEUE_TIMEOUT", "CONTEXT_LENGTH_EXCEEDED")
            if last.code == "CONTEXT_LENGTH_EXCEEDED":
                assert last.numbers["pool_tokens"] < self.resolved.num_pages * self.resolved.page_size
        else:
            assert isinstance(last, Tokens)
            self._check_end(asked, last, len(got), right[-1])

    def _check_end(self, asked: GenerateRequest, last: Tokens, count: int, following: int) -> None:
        if last.finish is FinishReason.STOP:
            assert following == EOS
        elif last.limited_by == "kv_pool":
            pages = self.smallest
            if self.layout.window is not None and self.resolved.window_pages < self.layout.tail + 2:
                pages = min(pages, self.resolved.window_pages)
            assert len(asked.token_ids) + count >= min(pages * self.resolved.page_size, self.resolved.max_seq_len)
        elif last.finish is not FinishReason.CANCELLED:
            assert last.finish is FinishReason.LENGTH
            assert count == asked.sampling.max_tokens or len(asked.token_ids) + count == self.resolved.max_seq_len


# ── pools and trees, from the inside ────────────────────────────────────────────────────────────────────────────────
def nodes(tree: PrefixTree) -> Iterator[object]:
    """Every node below the root; each knows its parent."""
    below = [tree._root]
    for node in below:
        for child in node.children.values():
            assert child.parent is node
            below.append(child)
    return iter(below[1:])


def path(node: object) -> list[int]:
    """All tokens from the root to the end of `node`'s page."""
    keys: list[bytes] = []
    while node.parent is not None:  # type: ignore[attr-defined]
        keys.insert(0, node.key)  # type: ignore[attr-defined]
        node = node.parent  # type: ignore[attr-defined]
    return [int.from_bytes(key[i : i + 8], "little") for key in keys for i in range(0, len(key), 8)]


def check_pool(pool: PagePool, tables: list[list[int]], kept: Iterable[int]) -> None:
    """free + used + cached is all there is; each table holds a page once; only what the cache keeps is shared."""
    users, kept = Counter(itertools.chain.from_iterable(tables)), set(kept)
    assert [pool.users(page) for page in range(pool.total)] == [users[page] for page in range(pool.total)]
    assert pool.free + len({*users, *kept}) == pool.total
    assert pool.free == sum(pool._map) and pool.evictable == len(kept - {*users})
    assert all(0 <= page < pool.total for page in {*users, *kept})
    assert all(len(set(table)) == len(table) for table in tables)
    assert {page for page, count in users.items() if count > 1} <= kept


def check_shelf(shelf: Shelf, tables: list[list[int]], pages: Iterable[int]) -> None:
    """The same of a shelf, whose entries belong to `pages` of the tree and to no others."""
    entries = list(shelf._entries.values())
    assert len(set(entries)) == len(entries) and set(shelf._entries) <= set(pages)
    check_pool(shelf.pool, tables, entries)


def _given(number: int | None) -> list[int]:
    return [] if number is None else [number]
