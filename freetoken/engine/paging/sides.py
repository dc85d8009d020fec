"""What a sequence holds beside its pages of the full pool: a sliding window's pages, a recurrent state. Pure.

Both follow the sequence through the same moments (jump to a cached prefix, publish, release) and both limit where a
cached prefix can be entered: only where all that the next position needs was kept. Changes only `window`, `slid`,
`state`, `source` and `saving` of a Request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from freetoken.engine.paging.blocks import PagePool
from freetoken.engine.paging.rules import Layout
from freetoken.engine.paging.shelf import Shelf
from freetoken.engine.step import Request


class Side(Protocol):
    shelf: Shelf

    def depth(self, pages: Sequence[int], depth: int) -> int:
        """The longest part of `pages[:depth]`, which the prefix tree has, behind which a sequence can go on."""
        ...

    def jump(self, request: Request, pages: Sequence[int]) -> None:
        """`request` goes on behind `pages`, as `depth` found them; what it held for an earlier place is let go."""
        ...

    def publish(self, request: Request, pages: Sequence[int]) -> None:
        """The prefix tree has `pages`, which `request` has filled: keep with them what others need to go on."""
        ...

    def release(self, request: Request) -> None:
        """`request` lets go of all that it holds here."""
        ...


class Window:
    """The sliding-window pool. A sequence holds the pages from `slid` on; the cache keeps some of them by page."""

    def __init__(self, layout: Layout, entries: int) -> None:
        self.shelf = Shelf(entries)
        self._layout = layout

    def depth(self, pages: Sequence[int], depth: int) -> int:
        """A prefix can be entered where the tail in front of its end is kept whole."""
        place = depth
        while place > max(0, depth - self._layout.tail):
            place -= 1
            if self.shelf.get(pages[place]) is None:
                depth = place  # nothing that has this page in its tail
        return depth

    def jump(self, request: Request, pages: Sequence[int]) -> None:
        slid = self._layout.slid(len(pages) * self._layout.page_size)
        tail = [self.shelf.touch(page) for page in pages[slid:]]
        self.shelf.pool.share(tail)
        self.shelf.pool.release(request.window)
        request.window, request.slid = tail, slid

    def publish(self, request: Request, pages: Sequence[int]) -> None:
        for page, entry in zip(pages[request.slid :], request.window, strict=False):  # the last may not be whole
            if self.shelf.get(page) is None:
                self.shelf.keep(page, entry)

    def release(self, request: Request) -> None:
        self.shelf.pool.release(request.window)
        request.window, request.slid = [], 0

    def slide(self, request: Request) -> bool:
        """Give back pages that the next position does not see; whether there were any."""
        gone = self._layout.slid(request.computed) - request.slid
        if gone <= 0:
            return False
        self.shelf.pool.release(request.window[:gone])
        del request.window[:gone]
        request.slid += gone
        return True

    def reach(self, request: Request) -> int:
        """The position up to which the pool could let `request` be computed."""
        return (request.slid + len(request.window) + self.shelf.available) * self._layout.page_size


class States:
    """Recurrent states, one for each running sequence, and snapshots of them that the cache keeps by page.

    A snapshot that a step reads or writes is used by its request until the step has ended.
    """

    def __init__(self, page_size: int, states: int, snapshots: int) -> None:
        self.slots = PagePool(states)
        self.shelf = Shelf(snapshots)
        self._page_size = page_size

    def depth(self, pages: Sequence[int], depth: int) -> int:
        """A prefix can be entered where a snapshot was taken."""
        while depth and self.shelf.get(pages[depth - 1]) is None:
            depth -= 1
        return depth

    def jump(self, request: Request, pages: Sequence[int]) -> None:
        source = self.shelf.touch(pages[-1]) if pages else None
        if source is not None:
            self.shelf.pool.share([source])
        self._settle(request)
        request.source = source

    def save(self, request: Request, end: int) -> None:
        """Where the step ends a page and there is room, it leaves a snapshot."""
        if end % self._page_size == 0 and self.shelf.available:
            (request.saving,) = self.shelf.take(1)

    def publish(self, request: Request, pages: Sequence[int]) -> None:
        if request.saving is not None and self.shelf.get(pages[-1]) is None:  # the step ended where a page does
            self.shelf.keep(pages[-1], request.saving)
        self._settle(request)

    def release(self, request: Request) -> None:
        self._settle(request)
        if request.state is not None:
            self.slots.release([request.state])
            request.state = None

    def rewind(self, request: Request) -> None:
        """The step did not take place: what it should have saved is nothing."""
        if request.saving is not None:
            self.shelf.pool.release([request.saving])
            request.saving = None

    def _settle(self, request: Request) -> None:
        self.rewind(request)
        if request.source is not None:
            self.shelf.pool.release([request.source])
            request.source = None
