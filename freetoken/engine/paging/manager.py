"""The page table of each request: attach cached pages, fill, extend, publish, release. Pure.

Changes only `pages`, `computed` and `cached` of a Request. Does not decide who runs (scheduler/) and never says no:
where pages may be missing it returns False and has changed nothing.
"""

from __future__ import annotations

from freetoken.engine.paging.blocks import PagePool
from freetoken.engine.paging.prefix import PrefixTree
from freetoken.engine.paging.rules import Paged
from freetoken.engine.step import Request

_SHARES = 8  # one request's room to grow is at most this part of the pool, or later ones would find no run


class PageManager:
    def __init__(self, num_pages: int, rule: Paged) -> None:
        self.rule = rule
        self._pool = PagePool(num_pages)
        self._tree = PrefixTree(self._pool, rule.page_size)

    @property
    def total(self) -> int:
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

    def attach(self, request: Request) -> None:
        """Give `request`, which has no pages, the cached pages of its tokens: they count as computed."""
        assert not request.pages
        pages = self._tree.match(request.token_ids, self.rule.hit(len(request.token_ids)))
        self._pool.share(pages)
        request.pages = pages
        request.computed = len(pages) * self.rule.page_size

    def fill(self, request: Request) -> bool:
        """Pages for every token that `request` has so far."""
        tokens = len(request.token_ids)
        room = self.rule.pages(request.max_len) - self.rule.pages(tokens)
        return self._grow(request, tokens, min(room, self.total // _SHARES))

    def extend(self, request: Request) -> bool:
        """A page for the next position that `request` computes."""
        return self._grow(request, request.computed + 1, 0)

    def advance(self, request: Request) -> None:
        """Skip what another request has computed of this one's tokens since it was attached."""
        size = self.rule.page_size
        held = request.pages[: self.rule.whole(request.computed)]
        pages = self._tree.match(request.token_ids, self.rule.hit(len(request.token_ids)), held)
        gained = len(pages) * size - request.computed
        if gained > 0:
            self._swap(request, pages)
            request.computed += gained
            request.cached += gained

    def publish(self, request: Request) -> None:
        """Let others share the pages that `request` has filled. Where they were cached already it takes those."""
        pages = request.pages[: self.rule.whole(request.computed)]
        kept = self._tree.insert(request.token_ids, pages)
        if kept != pages:
            self._swap(request, kept)

    def release(self, request: Request) -> None:
        """Publish, then let go of everything. `request` can be attached again."""
        self.publish(request)
        self._pool.release(request.pages)
        request.pages = []
        request.computed = 0

    def _swap(self, request: Request, pages: list[int]) -> None:
        """Use `pages` in place of the first of the request's own; shared before released, for some are the same."""
        self._pool.share(pages)
        self._pool.release(request.pages[: len(pages)])
        request.pages[: len(pages)] = pages

    def _grow(self, request: Request, tokens: int, room: int) -> bool:
        count = self.rule.pages(tokens) - len(request.pages)
        if count <= 0:
            return True
        if count > self.available:
            return False
        if count > self._pool.free:
            self._tree.evict(count - self._pool.free)
        after = request.pages[-1] if request.pages else None
        request.pages += self._pool.take(count, after, room)
        return True
