"""A pool: who uses which page, and where the next ones come from. Pure.

A page is free, used by one or more requests, kept by the prefix cache, or both used and kept. Kept and not used means
evictable. So are slots of recurrent states. Does not know tokens or what a page holds. Misuse (freeing twice, keeping a
free page) raises PageFault: two owners of one page would mix two users' contexts, so nothing may go on from there.
"""

from __future__ import annotations

from collections.abc import Iterable

_FREE, _TAKEN = 1, 0


class PageFault(RuntimeError):
    """The bookkeeping of pages contradicts itself; a bug, never a user's doing."""


class PagePool:
    def __init__(self, pages: int) -> None:
        self.total = pages
        self.free = pages
        self.evictable = 0  # kept by the prefix cache and used by nobody
        self._map = bytearray([_FREE]) * pages  # bytes.find looks for runs at memory speed
        self._users = [0] * pages
        self._kept = bytearray(pages)
        self._cursor = 0  # where the last run with its room ended

    def take(self, count: int, after: int | None = None, room: int = 0) -> list[int]:
        """`count` free pages for one user, as one run where that is possible; there must be that many.

        `after` is the user's last page: its neighbour comes first. `room` is how many pages the user may want later;
        a run is looked for where they would fit behind.
        """
        if count > self.free:
            raise PageFault(f"{count} pages asked of {self.free} free ones")
        start = self._run(count, after, room)
        pages = list(range(start, start + count)) if start >= 0 else self._scattered(count)
        for page in pages:
            self._map[page] = _TAKEN
            self._users[page] = 1
        self.free -= count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user for each of `pages`, which are used or kept."""
        for page in pages:
            if self._map[page] == _FREE:
                raise PageFault(f"page {page} is shared though it is free")
            if self._users[page] == 0:
                self.evictable -= 1
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One user fewer for each of `pages`."""
        for page in pages:
            if self._users[page] == 0:
                raise PageFault(f"page {page} is released though nobody uses it")
            self._users[page] -= 1
            if self._users[page] == 0:
                if self._kept[page]:
                    self.evictable += 1
                else:
                    self._give_back(page)

    def keep(self, page: int) -> None:
        """The prefix cache holds `page`, which somebody uses."""
        if self._kept[page] or self._users[page] == 0:
            raise PageFault(f"page {page} cannot be kept: {self._users[page]} users, kept {bool(self._kept[page])}")
        self._kept[page] = 1

    def drop(self, page: int) -> None:
        """The prefix cache lets go of `page`, which nobody uses: it is free."""
        if not self._kept[page] or self._users[page]:
            raise PageFault(f"page {page} cannot be dropped: {self._users[page]} users, kept {bool(self._kept[page])}")
        self._kept[page] = 0
        self.evictable -= 1
        self._give_back(page)

    def resize(self, pages: int) -> None:
        """The pool has `pages` pages from now on; those above must be free."""
        if self._map[pages:].count(_TAKEN):
            raise PageFault(f"the pool cannot shrink to {pages} pages: higher ones are in use")
        grown = pages - self.total
        self._map = self._map[:pages] + bytearray([_FREE]) * grown
        self._users = self._users[:pages] + [0] * grown
        self._kept = self._kept[:pages] + bytearray(max(0, grown))
        self.free += grown
        self.total = pages
        self._cursor = 0

    def users(self, page: int) -> int:
        return self._users[page]

    def _give_back(self, page: int) -> None:
        self._map[page] = _FREE
        self.free += 1

    def _run(self, count: int, after: int | None, room: int) -> int:
        """First page of a free run, or -1."""
        if after is not None and self._map.startswith(bytes([_FREE]) * count, after + 1):
            return after + 1
        for wanted in (count + room, count) if room else (count,):
            run = bytes([_FREE]) * wanted
            start = self._map.find(run, self._cursor)
            if start < 0:
                start = self._map.find(run)
            if start >= 0:
                self._cursor = start + wanted
                return start
        return -1

    def _scattered(self, count: int) -> list[int]:
        pages, page = [], -1
        for _ in range(count):
            page = self._map.find(_FREE, page + 1)
            pages.append(page)
        return pages
