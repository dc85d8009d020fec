"""What the prefix cache keeps beside its pages: window pages, or snapshots of recurrent states. Pure.

An entry belongs to one page of the prefix tree and goes when that page goes, or before it: least recently used first,
when somebody needs its place. Does not know tokens or requests.
"""

from __future__ import annotations

from itertools import islice

from freetoken.engine.paging.blocks import PagePool


class Shelf:
    def __init__(self, entries: int) -> None:
        self.pool = PagePool(entries)
        self._entries: dict[int, int] = {}  # by page of the prefix tree, least recently used first

    @property
    def available(self) -> int:
        """Entries that are free, or free on demand."""
        return self.pool.free + self.pool.evictable

    def get(self, page: int) -> int | None:
        """The entry that is kept for `page`."""
        return self._entries.get(page)

    def keep(self, page: int, entry: int) -> None:
        """Keep `entry`, which somebody uses, for `page`, which has none."""
        self.pool.keep(entry)
        self._entries[page] = entry

    def touch(self, page: int) -> int:
        """The entry kept for `page`; it becomes the most recently used."""
        entry = self._entries[page] = self._entries.pop(page)
        return entry

    def drop(self, page: int) -> None:
        """`page` left the prefix tree: what is kept for it, and used by nobody, is free."""
        entry = self._entries.pop(page, None)
        if entry is not None:
            self.pool.drop(entry)

    def take(self, count: int) -> list[int]:
        """`count` entries for one user; that many must be available."""
        idle = (page for page, entry in self._entries.items() if not self.pool.users(entry))
        for page in list(islice(idle, max(0, count - self.pool.free))):
            self.drop(page)
        return self.pool.take(count)
