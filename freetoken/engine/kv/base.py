"""How a layer's cached rows are asked for. Does not know which sequence they belong to, or how pages are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

Slots: TypeAlias = Tensor | slice
"""Where a step's new rows go: (tokens) i64, or a slice where they are consecutive."""


@dataclass(frozen=True, slots=True)
class Keys:
    """`count` consecutive positions of one sequence. Where its pages are neighbours they are read in place."""

    pages: Tensor | None  # (pages) i64 to gather; None: the slots are consecutive
    first: int  # slot of the first position: in the pool, or among the gathered pages
    count: int


class KvCache(Protocol):
    """One layer's keys and values in pages."""

    @property
    def nbytes(self) -> int: ...

    def write(self, slots: Slots, k: Tensor, v: Tensor) -> None:
        """k, v (tokens, kv_heads, head_dim) f32."""
        ...

    def read(self, keys: Keys) -> tuple[Tensor, Tensor]:
        """k, v, each (kv_heads, keys, head_dim) f32."""
        ...
