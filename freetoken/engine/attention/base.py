"""What attention reads at a step: each sequence's span of cached keys, cut into blocks of queries.

Spans are worked out once a step and shared by all layers with the same window. Does not know layers or weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from freetoken_kernels.reference.attention import visible
from torch import Tensor

from freetoken.engine.kv.base import Keys, KvCache, Slots

QUERY_BLOCK = 128  # queries: a causal chunk cut so skips most of the triangle that a mask would only hide


@dataclass(frozen=True, slots=True)
class Run:
    """New tokens of one sequence: `length` rows of the step from first_row on, at positions from `start` on."""

    first_row: int
    length: int
    start: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries that attend together."""

    rows: slice  # of the step's tokens
    keys: slice  # of the span's keys
    mask: Tensor | None  # (queries * group, keys) f32, 0 or -inf; None: one query, which sees all of them


@dataclass(frozen=True, slots=True)
class Span:
    keys: Keys
    blocks: tuple[Block, ...]


class Spans:
    """The spans of one step."""

    def __init__(self, runs: Sequence[Run], page_size: int) -> None:
        self._runs, self._page_size = runs, page_size
        self._tables = [torch.tensor(run.pages) for run in runs]
        self._known: dict[tuple[int | None, int], list[Span]] = {}
        self.slots = _consecutive(torch.cat([self._slots(*pair) for pair in zip(runs, self._tables, strict=True)]))

    def of(self, window: int | None, group: int) -> list[Span]:
        """One span a sequence, in order of rows, holding just the pages that `window` lets its queries see. In masks,
        each query stands for the `group` heads that share its keys."""
        if (window, group) not in self._known:
            runs = zip(self._runs, self._tables, strict=True)
            self._known[window, group] = [self._span(run, table, window, group) for run, table in runs]
        return self._known[window, group]

    def _slots(self, run: Run, table: Tensor) -> Tensor:
        positions = torch.arange(run.start, run.start + run.length)
        pages = table[positions.div(self._page_size, rounding_mode="floor")]
        return pages * self._page_size + positions % self._page_size  # (length) i64

    def _span(self, run: Run, table: Tensor, window: int | None, group: int) -> Span:
        end = run.start + run.length
        first = 0 if window is None else max(0, run.start - window + 1)
        first_page, end_page = first // self._page_size, -(-end // self._page_size)
        used = run.pages[first_page:end_page]
        consecutive = used == tuple(range(used[0], used[0] + len(used)))
        skipped = first - first_page * self._page_size
        keys = Keys(
            pages=None if consecutive else table[first_page:end_page],
            first=skipped + (used[0] * self._page_size if consecutive else 0),
            count=end - first,
        )
        return Span(keys, tuple(_blocks(run, first, window, group)))


def _consecutive(slots: Tensor) -> Slots:
    first, count = int(slots[0]), len(slots)
    return slice(first, first + count) if torch.equal(slots, torch.arange(first, first + count)) else slots


def _blocks(run: Run, first_key: int, window: int | None, group: int) -> Iterator[Block]:
    """Blocks of `run`'s queries over keys that begin at position `first_key`."""
    for offset in range(0, run.length, QUERY_BLOCK):
        queries = min(QUERY_BLOCK, run.length - offset)
        start = run.start + offset
        low = first_key if window is None else max(first_key, start - window + 1)
        keys = start + queries - low
        mask = None
        if queries > 1:
            seen = visible(start, queries, low, keys, window)
            mask = torch.zeros(queries, keys).masked_fill_(~seen, float("-inf")).repeat_interleave(group, 0)
        rows = slice(run.first_row + offset, run.first_row + offset + queries)
        yield Block(rows, slice(low - first_key, low - first_key + keys), mask)


class Attend(Protocol):
    """A way to compute attention."""

    def __call__(
        self, q: Tensor, cache: KvCache, spans: list[Span], *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """q (tokens, heads, head_dim) f32, rotated -> (tokens, heads, head_dim) f32. The new keys are in the cache."""
        ...
