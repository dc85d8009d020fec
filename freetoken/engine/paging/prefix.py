"""The prefix cache: a radix tree whose digit is one page of token ids. Pure.

A node is one full page: the path to it spells every token before and in it, so two requests whose prompts begin alike
find the same pages. The pool says who uses a page; a request that uses a node's page uses all its ancestors' too, so
unused pages are always whole subtrees and can be evicted leaf by leaf, least recently used first. Does not know
requests.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

from freetoken.engine.paging.blocks import PagePool


class _Node:
    __slots__ = ("children", "key", "page", "parent", "used")

    def __init__(self, key: bytes, page: int, parent: _Node | None) -> None:
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[bytes, _Node] = {}
        self.used = 0  # tick of the last match or insert


class PrefixTree:
    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._root = _Node(b"", -1, None)
        self._tick = 0
        self._size = 0
        # (tick, serial, node) of what was a leaf when pushed; an entry whose tick is no longer the node's is stale.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._serial = 0

    def __len__(self) -> int:
        """Pages kept."""
        return self._size

    def match(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Pages of the longest cached prefix of `token_ids`, at most `limit`; they become the most recently used."""
        pages: list[int] = []
        node = self._root
        self._tick += 1
        for key in self._keys(token_ids, limit):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            node.used = self._tick
            pages.append(node.page)
        self._push(node)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Cache `pages`, which hold the first len(pages) pages of `token_ids`; each is used by somebody.

        Returns the tree's own page for each: another one than given where the same tokens were cached before.
        """
        kept: list[int] = []
        node = self._root
        self._tick += 1
        for key, page in zip(self._keys(token_ids, len(pages)), pages, strict=True):
            child = node.children.get(key)
            if child is None:
                self._pool.keep(page)
                child = node.children[key] = _Node(key, page, node)
                self._size += 1
            node = child
            node.used = self._tick
            kept.append(node.page)
        self._push(node)
        return kept

    def evict(self, count: int) -> None:
        """Free `count` pages, oldest leaves first; the pool must count that many evictable."""
        in_use: list[tuple[int, int, _Node]] = []
        while count:
            entry = heapq.heappop(self._leaves)
            tick, _, node = entry
            if node.used != tick or node.children or node.parent is None:
                continue
            if self._pool.users(node.page):
                in_use.append(entry)
                continue
            self._remove(node)
            count -= 1
        for entry in in_use:
            heapq.heappush(self._leaves, entry)

    def _remove(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        leaf.parent = None
        self._pool.drop(leaf.page)
        self._size -= 1
        self._push(parent)

    def _push(self, node: _Node) -> None:
        if node is self._root or node.children:
            return
        if len(self._leaves) > 2 * self._size + 64:
            self._leaves = [entry for entry in self._leaves if entry[2].used == entry[0] and entry[2].parent]
            heapq.heapify(self._leaves)
        self._serial += 1
        heapq.heappush(self._leaves, (node.used, self._serial, node))

    def _keys(self, token_ids: Sequence[int], limit: int) -> Iterator[bytes]:
        size = self._page_size
        for page in range(min(limit, len(token_ids) // size)):
            yield array("q", token_ids[page * size : (page + 1) * size]).tobytes()
