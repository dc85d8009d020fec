"""The shape of one layer's cache by kind of mixer. Does not know models, budgets or how pages are shared."""

from __future__ import annotations

from collections.abc import Callable

from freetoken.catalog.spec import Attention, Mixer
from freetoken.core.registry import Registry
from freetoken.engine.kv.base import KvCache
from freetoken.engine.kv.paged import PagedKv


def _attention(mixer: Mixer, pages: int, page_size: int) -> KvCache:
    assert isinstance(mixer, Attention)
    return PagedKv(mixer.kv_heads, mixer.head_dim, pages, page_size)


LAYOUTS: Registry[Callable[[Mixer, int, int], KvCache]] = Registry("kind of mixer", {"Attention": _attention})


def allocate(mixer: Mixer, pages: int, page_size: int) -> KvCache:
    """A cache of `pages` pages and one dummy page more."""
    return LAYOUTS[type(mixer).__name__](mixer, pages + 1, page_size)
