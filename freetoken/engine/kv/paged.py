"""Keys and values of one attention layer: a pool of pages, fp32, heads outermost.

Heads come first so that one head's keys of neighbouring pages are one block of memory, which attention reads in place.
The pool is not cleared: no slot is read before it is written, and the OS gives memory only to pages that are touched.
Does not know which page belongs to whom.
"""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.engine.kv.base import Keys, Slots


class PagedKv:
    """`pages` pages of `page_size` tokens."""

    def __init__(self, kv_heads: int, head_dim: int, pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._pool = torch.empty(2, kv_heads, pages * page_size, head_dim)  # (k and v, kv_heads, slots, head_dim) f32
        self._k, self._v = self._pool.unbind(0)
        self._by_page = self._pool.view(2, kv_heads, pages, page_size * head_dim)

    @property
    def nbytes(self) -> int:
        return int(self._pool.nbytes)

    def write(self, slots: Slots, k: Tensor, v: Tensor) -> None:
        for pool, rows in ((self._k, k.transpose(0, 1)), (self._v, v.transpose(0, 1))):  # (kv_heads, tokens, head_dim)
            if isinstance(slots, slice):
                pool[:, slots] = rows
            else:
                pool.index_copy_(1, slots, rows)

    def read(self, keys: Keys) -> tuple[Tensor, Tensor]:
        stop = keys.first + keys.count
        if keys.pages is None:
            return self._k[:, keys.first : stop], self._v[:, keys.first : stop]
        gathered = self._by_page.index_select(2, keys.pages)  # (2, kv_heads, pages, page_size * head_dim) f32
        k, v = gathered.view(2, gathered.shape[1], -1, self._k.shape[-1]).unbind(0)
        return k[:, keys.first : stop], v[:, keys.first : stop]
