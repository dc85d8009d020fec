"""What each request holds of the pools: attach a cached prefix, fill, extend, publish, release, shrink. Pure.

Changes only what a Request holds, `computed` and `cached`. Does not decide who runs (scheduler/) and never says no:
where something is missing it says so and has changed nothing.
"""

from __future__ import annotations

from freetoken.engine.paging.blocks import PagePool
from freetoken.engine.paging.prefix import PrefixTree
from freetoken.engine.paging.rules import Demand, Layout
from freetoken.engine.paging.sides import Side, States, Window
from freetoken.engine.step import Request

_SHARES = 8  # one request's room to grow is at most this part of the pool, or later ones would find no run


class PageManager:
    """`capacity` is what the pools hold, `snapshots` how many recurrent states the prefix cache may keep."""

    def __init__(self, layout: Layout, capacity: Demand, snapshots: int = 0) -> None:
        self.layout = layout
        self.returns = 0  # grows whenever what somebody else may want was given back or was published
        self._pool = PagePool(capacity.pages)
        self._tree = PrefixTree(self._pool, layout.page_size, self._dropped)
        self._window = None if layout.window is None else Window(layout, capacity.window)
        self._states = States(layout.page_size, capacity.states, snapshots) if layout.recurrent else None
        self._sides: tuple[Side, ...] = tuple(side for side in (self._window, self._states) if side is not None)

    # ── how much there is ───────────────────────────────────────────────────────────────────────────────────────────
    @property
    def total(self) -> int:
        """Pages of the full pool; so are the next three."""
        return self._pool.total

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return self._pool.free

    @property
    def cached(self) -> int:
        """Pages that the prefix cache alone holds: free on demand."""
        return self._pool.evictable

    @property
    def available(self) -> int:
        return self._pool.free + self._pool.evictable

    @property
    def capacity(self) -> Demand:
        """What the pools hold in all."""
        window, states = self._window, self._states
        return Demand(self._pool.total, window.shelf.pool.total if window else 0, states.slots.total if states else 0)

    @property
    def room(self) -> Demand:
        """What could be had now."""
        window, states = self._window, self._states
        return Demand(self.available, window.shelf.available if window else 0, states.slots.free if states else 0)

    @staticmethod
    def held(request: Request) -> Demand:
        return Demand(len(request.pages), len(request.window), int(request.state is not None))

    # ── a request's way ─────────────────────────────────────────────────────────────────────────────────────────────
    def attach(self, request: Request) -> None:
        """Give `request`, which holds nothing, the cached prefix of its tokens: that counts as computed."""
        assert not request.pages
        self._jump(request, self._match(request))

    def detach(self, request: Request) -> None:
        """Undo `attach`: nothing has changed for anybody."""
        for side in self._sides:
            side.release(request)
        self._pool.release(request.pages)
        request.pages = []
        request.computed = 0

    def fill(self, request: Request) -> bool:
        """Pages for every token that `request` has so far, and its state. Window pages come with `extend`."""
        tokens = len(request.token_ids)
        room = self.layout.pages(request.max_len) - self.layout.pages(tokens)
        need = Demand(self.layout.pages(tokens), 0, int(self.layout.recurrent))
        return self._take(request, need, min(room, self.total // _SHARES))

    def extend(self, request: Request, most: int) -> int:
        """Make room to compute the next `most` tokens of `request`, or as many as the window pool lets it.

        Returns how many; 0 where not even the first has room. A step that ends a page of a prompt saves the recurrent
        state there if it can.
        """
        start, end = request.computed, request.computed + most
        if not self._sides and end <= len(request.pages) * self.layout.page_size:
            return most  # nearly always: the page has room, or prefill has its pages already
        if self._window is not None:
            self.returns += self._window.slide(request)
            end = min(end, self._window.reach(request))
        if end <= start or not self._take(request, self.layout.step(start, end)):
            return 0
        if self._states is not None and len(request.token_ids) - start > 1:
            self._states.save(request, end)
        return end - start

    def advance(self, request: Request) -> None:
        """Skip what another request has computed of this one's tokens since it was attached."""
        held = request.pages[: self.layout.whole(request.computed)]
        pages = self._match(request, held)
        gained = len(pages) * self.layout.page_size - request.computed
        if gained > 0:
            self._jump(request, pages)
            request.cached += gained

    def publish(self, request: Request) -> None:
        """The step is done: let others share what `request` has filled. What was cached already it takes from there."""
        self.returns += 1
        pages = request.pages[: self.layout.whole(request.computed)]
        kept = self._tree.insert(request.token_ids, pages)
        if kept != pages:
            self._swap(request, kept)
        for side in self._sides:
            side.publish(request, kept)

    def rewind(self, request: Request) -> None:
        """The step failed: `request` is where it was before. Its pages stay, the next step writes them again."""
        if self._states is not None:
            self._states.rewind(request)

    def release(self, request: Request) -> None:
        """Publish, then let go of everything. `request` can be attached again."""
        self.rewind(request)
        self.publish(request)
        self.detach(request)

    # ── the pool's size ─────────────────────────────────────────────────────────────────────────────────────────────
    def resize(self, pages: int) -> None:
        """The full pool has `pages` pages from now on; those above must be used by nobody. What they cached is gone."""
        self._tree.vacate(pages)
        self._pool.resize(pages)
        self.returns += 1

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _match(self, request: Request, held: list[int] | None = None) -> list[int]:
        """The cached pages of `request`'s tokens behind which it could go on."""
        pages = self._tree.match(request.token_ids, self.layout.hit(len(request.token_ids)), held or [])
        depth, last = len(pages), -1
        while depth != last:  # until all sides agree
            last = depth
            for side in self._sides:
                depth = side.depth(pages, depth)
        return pages[:depth]

    def _jump(self, request: Request, pages: list[int]) -> None:
        """`request` goes on behind `pages`, which `_match` found."""
        self._swap(request, pages)
        request.computed = len(pages) * self.layout.page_size
        for side in self._sides:
            side.jump(request, pages)

    def _swap(self, request: Request, pages: list[int]) -> None:
        """Use `pages` in place of the first of the request's own; shared before released, for some are the same."""
        self._pool.share(pages)
        self._pool.release(request.pages[: len(pages)])
        request.pages[: len(pages)] = pages

    def _take(self, request: Request, wanted: Demand, room: int = 0) -> bool:
        """Give `request` what it lacks of `wanted`, out of what is free or cached. False: it is not to be had."""
        need = wanted.beyond(self.held(request))
        if not need.fits(self.room):
            return False
        if need.pages:
            self._tree.evict(max(0, need.pages - self._pool.free))
            request.pages += self._pool.take(need.pages, request.pages[-1] if request.pages else None, room)
        if need.window:
            assert self._window is not None
            request.window += self._window.shelf.take(need.window)
        if need.states:
            assert self._states is not None
            (request.state,) = self._states.slots.take(1)
        return True

    def _dropped(self, page: int) -> None:
        for side in self._sides:
            side.shelf.drop(page)
