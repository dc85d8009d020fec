"""Pages, the prefix tree and the page tables, one fact at a time."""

from __future__ import annotations

import pytest

from freetoken.core.types import SamplingParams
from freetoken.engine.paging.blocks import PageFault, PagePool
from freetoken.engine.paging.manager import PageManager
from freetoken.engine.paging.prefix import PrefixTree
from freetoken.engine.paging.rules import Demand, Layout
from freetoken.engine.paging.shelf import Shelf
from freetoken.engine.step import Request


def request(tokens: list[int], max_len: int = 100) -> Request:
    return Request("r", len(tokens), list(tokens), SamplingParams(), frozenset(), 0.0, 1e9, max_len)


def compute(manager: PageManager, tokens: list[int]) -> Request:
    """A request that has attached, filled and computed all of `tokens`."""
    made = request(tokens)
    manager.attach(made)
    assert manager.fill(made)
    made.computed = len(tokens)
    return made


def test_pages_come_as_one_run_where_there_is_one() -> None:
    pool = PagePool(8)
    a, b = pool.take(3), pool.take(2)
    assert (a, b) == ([0, 1, 2], [3, 4])
    pool.release(a)
    assert pool.take(2) == [5, 6]  # behind the last run, so that neighbours stay free for those that grow
    assert pool.take(3) == [0, 1, 2]
    assert pool.free == 1


def test_a_run_is_cut_only_when_none_is_long_enough() -> None:
    pool = PagePool(6)
    pages = [pool.take(1)[0] for _ in range(6)]
    pool.release([pages[0], pages[2], pages[3], pages[5]])
    assert pool.take(4) == [0, 2, 3, 5]


def test_a_request_grows_into_the_room_that_was_left_behind_it() -> None:
    pool = PagePool(20)
    a = pool.take(2, room=5)
    b = pool.take(2, room=5)
    for _ in range(5):
        a += pool.take(1, after=a[-1])
        b += pool.take(1, after=b[-1])
    assert a == list(range(7)) and b == list(range(7, 14))


@pytest.mark.parametrize(
    "misuse", ["release twice", "release free", "share free", "too many", "keep free", "drop used"]
)
def test_misuse_raises_instead_of_making_two_owners(misuse: str) -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    with pytest.raises(PageFault):
        match misuse:
            case "release twice":
                pool.release(pages * 2)
            case "release free":
                pool.release([3])
            case "share free":
                pool.share([3])
            case "too many":
                pool.take(3)
            case "keep free":
                pool.keep(3)
            case "drop used":
                pool.keep(pages[0])
                pool.drop(pages[0])


def test_a_page_is_free_again_only_after_its_last_user_and_the_cache() -> None:
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.keep(page)
    pool.share([page])
    pool.release([page])
    assert (pool.free, pool.evictable) == (1, 0)
    pool.release([page])
    assert (pool.free, pool.evictable) == (1, 1)
    pool.share([page])
    assert (pool.free, pool.evictable) == (1, 0)
    pool.release([page])
    pool.drop(page)
    assert (pool.free, pool.evictable) == (2, 0)


def test_rules_count_pages_and_leave_the_last_prompt_token_to_compute() -> None:
    rule = Layout(16)
    assert [rule.pages(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [rule.whole(tokens) for tokens in (15, 16, 33)] == [0, 1, 2]
    assert [rule.hit(tokens) for tokens in (1, 16, 17, 1000)] == [0, 0, 1, 62]


def test_the_tree_matches_the_longest_page_aligned_prefix() -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool, 2)
    pages = pool.take(3)
    assert tree.insert([1, 2, 3, 4, 5, 6], pages) == pages
    assert tree.match([1, 2, 3, 4, 5, 6, 7], 9) == pages
    assert tree.match([1, 2, 3, 4, 9, 9], 9) == pages[:2]
    assert tree.match([1, 2, 3], 9) == pages[:1]
    assert tree.match([1, 2, 3, 4], 1) == pages[:1]
    assert tree.match([2, 1], 9) == tree.match([], 9) == []


def test_the_tree_branches_and_keeps_what_it_had() -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool, 2)
    first, second = pool.take(2), pool.take(2)
    tree.insert([1, 2, 3, 4], first)
    assert tree.insert([1, 2, 5, 6], second) == [first[0], second[1]]
    assert tree.match([1, 2, 5, 6], 9) == [first[0], second[1]]
    assert len(tree) == 3


def test_eviction_takes_the_least_recently_used_leaf_never_one_in_use() -> None:
    pool = PagePool(8)
    tree = PrefixTree(pool, 1)
    old, new, used = pool.take(2), pool.take(1), pool.take(1)
    tree.insert([1, 2], old)
    tree.insert([7], new)
    tree.insert([9], used)
    pool.release([*old, *new])
    tree.match([1, 2], 9)  # now newer than [7]
    tree.evict(1)
    assert (tree.match([7], 9), tree.match([1, 2], 9)) == ([], old)
    tree.evict(1)
    assert tree.match([1, 2], 9) == old[:1]  # leaves go before what they hang on
    tree.evict(1)
    assert tree.match([1], 9) == [] and tree.match([9], 9) == used
    pool.release(used)
    tree.evict(1)
    assert pool.free == 8 and len(tree) == 0


def test_touching_prefixes_for_ever_does_not_grow_the_tree() -> None:
    pool = PagePool(4)
    tree = PrefixTree(pool, 1)
    pages = pool.take(2)
    tree.insert([1, 2], pages)
    pool.release(pages)
    for _ in range(1000):
        tree.match([1, 2], 2)
    assert len(tree._leaves) < 200
    tree.evict(2)
    assert pool.free == 4


def test_a_second_request_takes_the_pages_of_the_first_and_computes_the_rest() -> None:
    manager = PageManager(Layout(4), Demand(16))
    first = compute(manager, list(range(10)))
    manager.publish(first)
    second = request([*range(8), 99])
    manager.attach(second)
    assert second.computed == 8 and second.pages == first.pages[:2]
    assert manager.fill(second)
    assert second.pages[2] not in first.pages
    manager.release(first)
    assert (manager.free, manager.cached) == (13, 0)
    manager.release(second)
    assert (manager.free, manager.cached) == (14, 2)


def test_two_that_computed_the_same_share_one_copy_afterwards() -> None:
    manager = PageManager(Layout(4), Demand(16))
    twins = [request(list(range(9))) for _ in range(2)]
    for twin in twins:
        manager.attach(twin)
        assert manager.fill(twin)
        twin.computed = 9
    assert not {*twins[0].pages} & {*twins[1].pages}
    for twin in twins:
        manager.publish(twin)
    assert twins[0].pages[:2] == twins[1].pages[:2] and twins[0].pages[2] != twins[1].pages[2]
    assert manager.free == 16 - 4


def test_advance_skips_what_another_has_computed_since() -> None:
    manager = PageManager(Layout(4), Demand(16))
    late = request(list(range(13)))
    manager.attach(late)
    assert manager.fill(late)
    late.computed = 2
    first = compute(manager, list(range(13)))
    manager.publish(first)
    manager.advance(late)
    assert (late.computed, late.cached, late.pages[:3]) == (12, 10, first.pages[:3])
    manager.advance(late)
    assert (late.computed, late.cached) == (12, 10)


def test_cached_pages_give_way_and_the_answer_is_no_when_they_are_not_enough() -> None:
    manager = PageManager(Layout(4), Demand(4))
    manager.release(compute(manager, list(range(12))))
    assert (manager.free, manager.cached, manager.available) == (1, 3, 4)
    big = request(list(range(100, 116)))
    manager.attach(big)
    assert manager.fill(big) and (manager.free, manager.cached) == (0, 0)
    big.computed = 16
    assert not manager.extend(big, 1) and len(big.pages) == 4


def test_a_pool_shrinks_only_below_what_is_used_and_grows_again() -> None:
    pool = PagePool(6)
    low, high = pool.take(2), pool.take(2)
    with pytest.raises(PageFault):
        pool.resize(3)
    assert (pool.total, pool.free) == (6, 2)
    pool.release(high)
    pool.resize(3)
    assert (pool.total, pool.free) == (3, 1) and pool.take(1) == [2]
    pool.resize(5)
    assert pool.take(2) == [3, 4] and pool.free == 0
    pool.release(low)
    assert pool.free == 2


def test_a_shrunken_tree_forgets_pages_that_are_gone_and_all_that_hangs_on_them() -> None:
    gone: list[int] = []
    pool = PagePool(6)
    tree = PrefixTree(pool, 1, gone.append)
    pages = pool.take(6)
    tree.insert([1, 2, 3], [pages[0], pages[5], pages[1]])  # page 1 hangs on page 5
    tree.insert([7, 8], [pages[2], pages[3]])
    pool.release(pages)
    tree.vacate(4)
    pool.resize(4)
    assert gone == [1, 5] and pool.free + pool.evictable == 4
    assert tree.match([1, 2, 3], 9) == [0] and tree.match([7, 8], 9) == [2, 3]
    tree.evict(3)
    assert pool.free == 4 and len(tree) == 0


def test_a_shelf_gives_up_what_was_used_longest_ago_and_nothing_that_is_in_use() -> None:
    shelf = Shelf(3)
    for page in (10, 11, 12):
        (entry,) = shelf.take(1)
        shelf.keep(page, entry)
        shelf.pool.release([entry])
    shelf.touch(10)
    shelf.pool.share([1])  # of page 11
    assert shelf.available == 2
    assert shelf.take(1) == [2] and shelf.get(12) is None
    assert shelf.take(1) == [0] and shelf.get(10) is None
    assert shelf.get(11) == 1 and shelf.available == 0
    with pytest.raises(PageFault):
        shelf.drop(11)


def test_a_window_prefix_needs_every_page_of_its_tail() -> None:
    manager = PageManager(Layout(2, window=4), Demand(16, window=8))
    tokens = list(range(9))
    first = request(tokens[:8])
    manager.attach(first)
    assert manager.fill(first) and manager.extend(first, 8) == 8
    first.computed = 8
    manager.release(first)
    assert manager._window is not None
    for evicted, hit in ((0, 8), (2, 8), (1, 0)):  # the position behind 8 sees 5 .. 7, which lie in the last two pages
        manager._window.shelf.take(evicted + manager._window.shelf.pool.free)
        second = request(tokens)
        manager.attach(second)
        assert (second.computed, len(second.window)) == (hit, hit // 4)
        manager.detach(second)
