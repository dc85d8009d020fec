"""A caching allocator as torch documents its own ("CUDA semantics: memory management", expandable_segments).

Requests are rounded up to 512 bytes. Up to 1 MiB come from a pool that grows 2 MiB at a time, larger ones from a pool
that grows 20 MiB at a time; a pool is one address range that only grows. The smallest free block that is large enough
is cut; what is freed joins its free neighbours, is kept, and is never moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20
GRAIN = 512
SMALL = MIB


@dataclass
class _Pool:
    page: int
    size: int = 0  # bytes mapped
    free: list[tuple[int, int]] = field(default_factory=list)  # (start, size), by start, never adjacent

    def take(self, size: int) -> int:
        best = min((block for block in self.free if block[1] >= size), key=lambda block: block[1], default=None)
        if best is None:
            self._grow(size)
            return self.take(size)
        self.free.remove(best)
        if best[1] > size:
            self._insert(best[0] + size, best[1] - size)
        return best[0]

    def give(self, start: int, size: int) -> None:
        self._insert(start, size)

    def _grow(self, size: int) -> None:
        """Map as many pages as the request needs beside the free block at the end."""
        last = self.free[-1] if self.free and sum(self.free[-1]) == self.size else (self.size, 0)
        more = -(-(size - last[1]) // self.page) * self.page
        self._insert(self.size, more)
        self.size += more

    def _insert(self, start: int, size: int) -> None:
        before = next((block for block in self.free if sum(block) == start), None)
        after = next((block for block in self.free if block[0] == start + size), None)
        for block in (before, after):
            if block:
                self.free.remove(block)
        first = before[0] if before else start
        end = sum(after) if after else start + size
        self.free.append((first, end - first))
        self.free.sort()


class CachingAllocator:
    """`reserved` is what it holds of the card."""

    def __init__(self) -> None:
        self._small, self._large = _Pool(2 * MIB), _Pool(20 * MIB)
        self._live: dict[int, tuple[_Pool, int, int]] = {}
        self._next = 0

    @property
    def reserved(self) -> int:
        return self._small.size + self._large.size

    @property
    def live(self) -> int:
        return sum(size for _, _, size in self._live.values())

    def take(self, size: int) -> int:
        """A handle for `size` bytes."""
        rounded = max(GRAIN, -(-size // GRAIN) * GRAIN)
        pool = self._small if rounded <= SMALL else self._large
        self._next += 1
        self._live[self._next] = (pool, pool.take(rounded), rounded)
        return self._next

    def give(self, handle: int) -> None:
        pool, start, size = self._live.pop(handle)
        pool.give(start, size)
