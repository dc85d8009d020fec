"""The prefix cache: a radix tree whose digit is one page of token ids. Pure.

A node is one full page: the path to it spells every token before and in it, so two requests whose prompts begin alike
find the same pages. The pool says who uses a page; a request that uses a node's page uses all its ancestors' too, so
unused pages are always whole subtrees and can be evicted leaf by leaf, least recently used first. Does not know
requests.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator, Sequence

from freetoken.engine.paging.blocks import PagePool


class _Node:
    __slots__ = ("children", "key", "page", "parent", "used")

    def __init__(self, key: bytes, page: int, parent: _Node | None) -> None:
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[bytes, _Node] = {}
        self.used = 0  # tick of the last match or insert that ended here, or below and has been evicted


class PrefixTree:
    """`dropped` is told each page that leaves the tree, before the page is free."""

    def __init__(self, pool: PagePool, page_size: int, dropped: Callable[[int], None] | None = None) -> None:
        self._pool = pool
        self._dropped = dropped
        self._page_size = page_size
        self._root = _Node(b"", -1, None)
        self._nodes: dict[int, _Node] = {}  # by page
        self._tick = 0
        # (tick, serial, node) of what was a leaf when pushed; an entry whose tick is no longer the node's is stale.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._serial = 0

    def __len__(self) -> int:
        """Pages kept."""
        return len(self._nodes)

    def match(self, token_ids: Sequence[int], limit: int, held: Sequence[int] = ()) -> list[int]:
        """Pages of the longest cached prefix of `token_ids`, at most `limit`; they become the most recently used.

        `held` are pages that a request uses for its first tokens: where the tree has them, it is not walked again.
        """
        node, known = self._deepest(held)
        pages = list(held[:known])
        self._tick += 1
        for key in self._keys(token_ids, known, limit):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(node.page)
        node.used = self._tick
        self._push(node)
        return pages

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Cache `pages`, which hold the first len(pages) pages of `token_ids`; each is used by somebody.

        Returns the tree's own page for each: another one than given where the same tokens were cached before.
        """
        node, known = self._deepest(pages)
        kept = list(pages[:known])
        self._tick += 1
        for key, page in zip(self._keys(token_ids, known, len(pages)), pages[known:], strict=True):
            child = node.children.get(key)
            if child is None:
                self._pool.keep(page)
                child = node.children[key] = self._nodes[page] = _Node(key, page, node)
            node = child
            kept.append(node.page)
        node.used = self._tick
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

    def vacate(self, pages: int) -> None:
        """Free every page from number `pages` on, and all that hangs below one; nobody may use them."""
        for node in [node for page, node in self._nodes.items() if page >= pages]:
            self._prune(node)

    def _prune(self, top: _Node) -> None:
        """Remove `top` and all below it; nothing where it has gone already. Not recursive: a path may be long."""
        below = [top] if top.parent is not None else []
        for node in below:
            below += node.children.values()
        for node in reversed(below):
            self._remove(node)

    def _remove(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        del self._nodes[leaf.page]
        leaf.parent = None
        if self._dropped is not None:
            self._dropped(leaf.page)
        self._pool.drop(leaf.page)
        parent.used = max(parent.used, leaf.used)  # whoever used the leaf used what it hangs on
        self._push(parent)

    def _push(self, node: _Node) -> None:
        if node is self._root or node.children:
            return
        if len(self._leaves) > 2 * len(self._nodes) + 64:
            self._leaves = [entry for entry in self._leaves if entry[2].used == entry[0] and entry[2].parent]
            heapq.heapify(self._leaves)
        self._serial += 1
        heapq.heappush(self._leaves, (node.used, self._serial, node))

    def _deepest(self, pages: Sequence[int]) -> tuple[_Node, int]:
        """The node of the last of `pages` that the tree has, and how many that makes: then it has all before it."""
        for known in range(len(pages), 0, -1):
            if (node := self._nodes.get(pages[known - 1])) is not None:
                return node, known
        return self._root, 0

    def _keys(self, token_ids: Sequence[int], start: int, limit: int) -> Iterator[bytes]:
        size = self._page_size
        for page in range(start, min(limit, len(token_ids) // size)):
            yield array("q", token_ids[page * size : (page + 1) * size]).tobytes()
