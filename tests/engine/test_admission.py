"""Who is let in, who waits and who is refused: the cases that were reported of other engines, with their numbers.

"FT" is the public FreeToken's issue tracker.
"""

from __future__ import annotations

import pytest

from freetoken.core import errors
from freetoken.core.events import Failed, Tokens
from freetoken.core.types import FinishReason
from freetoken.engine.paging.blocks import PageFault
from freetoken.engine.paging.rules import Demand, Layout
from freetoken.engine.scheduler.admission import demand
from freetoken.engine.scheduler.queue import MOST_OVERTAKES
from freetoken.engine.step import Sampled, StepPlan, StepResult
from tests.fakes.runner import oracle
from tests.fakes.schedule import Bench, prompt


def _any(plan: StepPlan) -> StepResult:
    """A result without a runner: long prompts would take it long to check."""
    return StepResult({work.request_id: Sampled(7) for work in plan.work if work.sample}, 1)


BIG = {"page_size": 1, "max_prefill_tokens": 8192, "max_seq_len": 200_000}


# ── too long for the pool: refused at the door, with both numbers ───────────────────────────────────────────────────
def test_8760_tokens_against_8209_pages_are_refused_at_once_and_8011_pass() -> None:
    """FT #111: the longer one was queued for ever, without a log line or an error."""
    bench = Bench(BIG | {"num_pages": 8209})
    with pytest.raises(errors.ContextLengthExceeded) as refusal:
        bench.submit("long", prompt(8760))
    assert refusal.value.numbers == {"prompt_tokens": 8760, "context_tokens": 200_000, "pool_tokens": 8209}
    assert "8,760" in refusal.value.detail and "8,209" in refusal.value.detail
    bench.submit("fits", prompt(8011), most=2)
    bench.finish()
    assert len(bench.tokens("fits")) == 2


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_longest_prompt_of_a_pool_runs_and_one_token_more_is_refused(page_size: int) -> None:
    """What the door lets in, admission lets in too, at every rounding: nothing is queued that can never start."""
    pages = 40
    longest = (pages - 1) * page_size
    bench = Bench({"page_size": page_size, "num_pages": pages, "max_prefill_tokens": 4096, "max_seq_len": 10_000})
    with pytest.raises(errors.ContextLengthExceeded):
        bench.submit("a", prompt(longest + 1))
    bench.submit("b", prompt(longest), most=1)
    assert bench.step() is not None
    assert len(bench.tokens("b")) == 1


@pytest.mark.parametrize(("pool", "tokens"), [(8209, 21_661), (8221, 16_535)])
def test_too_long_is_the_callers_error_and_names_the_setting(pool: int, tokens: int) -> None:
    """FT #44 and #403: status 500 for prompts beyond the default pool."""
    bench = Bench(BIG | {"num_pages": pool})
    with pytest.raises(errors.ContextLengthExceeded) as refusal:
        bench.submit("long", prompt(tokens))
    assert refusal.value.http_status == 400 and "--num-tokens" in refusal.value.detail


def test_the_limit_follows_the_live_pool_and_no_hint() -> None:
    """33 611 tokens were refused at a sizing hint of 32 768 while the pool held 350 000 and the model a million."""
    bench = Bench(BIG | {"num_pages": 350_000, "max_seq_len": 350_000})
    bench.submit("a", prompt(33_611), most=1)
    bench.scheduler.resize(32_768)
    bench.listen()
    last = bench.last("a")
    assert isinstance(last, Failed) and last.code == "CONTEXT_LENGTH_EXCEEDED"
    assert (last.numbers["prompt_tokens"], last.numbers["pool_tokens"]) == (33_611, 32_768)
    assert "33,611" in last.detail and "32,768" in last.detail
    bench.scheduler.resize(350_000)
    bench.submit("again", prompt(33_611), most=1)
    assert bench.step() is not None


@pytest.mark.parametrize("tokens", [65_530, 65_535, 160_689])
def test_nothing_is_cut_silently(tokens: int) -> None:
    """A server cut prompts to half its window and answered 200: here every token is computed, or the answer is no."""
    bench = Bench(BIG | {"num_pages": 65_536, "max_seq_len": 65_536})
    if tokens >= 65_536:
        with pytest.raises(errors.ContextLengthExceeded):
            bench.submit("a", prompt(tokens))
        return
    bench.submit("a", prompt(tokens), most=1)
    while bench.scheduler.live_ids:
        plan = bench.scheduler.next_plan()
        assert plan is not None
        bench.runner.computed += plan.tokens
        bench.scheduler.accept(plan, _any(plan))
    assert bench.runner.computed == tokens


# ── admitted, and more than the pool wants to grow: put back and resumed, never ended ───────────────────────────────
def test_two_requests_of_six_and_six_blocks_in_a_pool_of_sixteen_both_finish() -> None:
    """Admission that counts prompts only cancelled one of them in the middle of its answer."""
    bench = Bench({"page_size": 16, "num_pages": 16, "max_prefill_tokens": 256, "max_seq_len": 256})
    for name, begin in (("a", 0), ("b", 500)):
        bench.submit(name, prompt(6 * 16, begin), most=6 * 16)
    bench.finish()
    for name in "ab":
        last = bench.last(name)
        assert isinstance(last, Tokens) and (last.finish, last.limited_by) == (FinishReason.LENGTH, None)
        assert len(bench.tokens(name)) == 6 * 16
    assert bench.all_pages_back()


def test_four_conversations_in_a_window_pool_of_9176_wait_or_are_put_back_and_never_raise() -> None:
    """FT #202: "need 1669, have 1306" killed the worker. Here as there: 7.7k tokens of system prompt, 4 running."""
    bench = Bench(BIG | {"num_pages": 40_000, "window_pages": 9176, "max_prefill_tokens": 4096}, window=4096)
    for name in "abcdef":
        bench.submit(name, [*prompt(7700), *prompt(300, 1000 * ord(name))], most=2)
    most = 0
    while bench.scheduler.live_ids:
        plan = bench.scheduler.next_plan()
        assert plan is not None
        most = max(most, bench.scheduler.running)
        bench.scheduler.accept(plan, _any(plan))
        bench.listen()
    assert most > 1
    assert all(bench.last(name).finish is FinishReason.LENGTH for name in "abcdef")  # type: ignore[union-attr]
    assert bench.scheduler.pages.room == bench.scheduler.pages.capacity


def test_a_page_given_back_twice_raises_before_it_has_two_owners() -> None:
    """FT #204: 3 868 free + 8 742 in the tree != 26 231, after 3 598 pages were freed twice in seven minutes."""
    bench = Bench(BIG | {"num_pages": 26_231})
    bench.submit("a", prompt(8_742), most=50)
    bench.step()
    pages = bench.scheduler.pages
    assert pages.free == 26_231 - 8_742
    plan = bench.scheduler.next_plan()
    assert plan is not None
    bench.scheduler.cancel("a")
    bench.scheduler.accept(plan, _any(plan))
    assert pages.free + pages.cached == 26_231
    with pytest.raises(PageFault):
        pages._pool.release(plan.work[0].pages)


# ── one demand ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 33])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_what_least_promises_of_the_window_is_the_worst_that_a_page_sized_piece_touches(window: int, size: int) -> None:
    layout = Layout(size, window)
    touched = [len({p // size for p in range(max(0, at - window + 1), at + size)}) for at in range(200)]
    assert layout.least(10_000).window >= max(touched)
    assert layout.least(10_000).window <= max(touched) + 1
    for at in range(200):
        assert layout.step(at, at + size).window == touched[at]
        assert layout.slid(at) == max(0, at - window + 1) // size


def test_demand_has_a_line_for_each_pool_and_takes_off_what_the_cache_has_locked() -> None:
    layout = Layout(4, window=8, recurrent=True)
    assert demand(30, layout) == Demand(pages=9, window=4, states=1)
    assert demand(30, layout, held=Demand(pages=6, window=2)) == Demand(pages=3, window=2, states=1)
    assert demand(30, layout, resumed=True) == Demand(pages=8, window=4, states=1)
    assert demand(3, layout) == Demand(pages=2, window=2, states=1)
    full = Demand(pages=9, window=4, states=1)
    for short in (Demand(8, 4, 1), Demand(9, 3, 1), Demand(9, 4, 0)):
        assert full.fits(full) and not full.fits(short)


def test_a_window_pool_or_states_that_can_never_do_are_refused_by_name() -> None:
    bench = Bench({"window_pages": 3}, window=8)
    with pytest.raises(errors.ContextLengthExceeded, match="sliding-window pool, which holds 3"):
        bench.submit("a", prompt(30))
    bench.submit("b", prompt(8), most=1)
    bench = Bench({"state_slots": 0}, recurrent=True)
    with pytest.raises(errors.ContextLengthExceeded, match="recurrent state"):
        bench.submit("a", prompt(3))


def test_one_state_for_two_that_may_run_lets_the_second_wait_for_it() -> None:
    bench = Bench({"state_slots": 1, "snapshot_slots": 1}, recurrent=True)
    bench.submit("a", prompt(9), most=3)
    bench.submit("b", prompt(9), most=3)
    bench.step()
    assert (bench.scheduler.running, bench.scheduler.queued) == (1, 1)
    bench.finish()
    assert bench.first_tokens("b").cached == 8  # the snapshot at the end of the second page
    assert bench.tokens("a") == bench.tokens("b")


def test_a_recurrent_prefix_is_entered_only_where_a_snapshot_is_and_the_oldest_gives_way() -> None:
    changes = {"state_slots": 4, "snapshot_slots": 2, "max_prefill_tokens": 8}
    bench = Bench(changes, recurrent=True)
    bench.submit("a", prompt(19), most=1)  # snapshots at 8 and 16
    bench.finish()
    bench.submit("b", [*prompt(15), 999], most=1)  # three whole pages are the same, the snapshot lies at the second
    bench.finish()
    assert bench.first_tokens("b").cached == 8
    bench.submit("c", prompt(12, 100), most=1)  # its snapshot takes the place of the one at 16, unused the longest
    bench.finish()
    bench.submit("d", prompt(19), most=1)
    bench.finish()
    assert bench.first_tokens("d").cached in (0, 8)
    assert bench.tokens("d") == bench.tokens("a")


def test_one_that_comes_back_in_pieces_of_one_token_gives_its_snapshots_back() -> None:
    """The search found this: such a piece was taken for a decode, and its snapshot had a user for ever."""
    changes = {"num_pages": 8, "max_seq_len": 32, "max_prefill_tokens": 1, "state_slots": 2, "snapshot_slots": 2}
    bench = Bench(changes, recurrent=True)
    bench.submit("old", prompt(8), most=16)
    bench.submit("new", prompt(8, 50), most=16)
    bench.finish()
    assert bench.runner.computed > 2 * (8 + 15)  # it was put back, and computed anew
    states = bench.scheduler.pages._states
    assert states is not None and states.shelf.available == 2
    assert bench.tokens("new") == oracle(prompt(8, 50), 16)


def test_a_window_prefix_is_entered_where_its_tail_is_kept() -> None:
    bench = Bench({"window_pages": 24}, window=8)
    bench.submit("a", prompt(30), most=8)
    bench.finish()
    bench.submit("b", [*prompt(22), *prompt(9, 500)], most=3)
    bench.finish()
    assert bench.first_tokens("b").cached == 20
    assert len(bench.tokens("b")) == 3


def test_nobody_starts_without_a_page_for_output_only_to_be_put_back_at_once() -> None:
    bench = Bench({"num_pages": 5, "max_seq_len": 20})
    bench.submit("a", prompt(9), most=3)  # three pages, to the end
    bench.submit("b", prompt(8, 50), most=3)  # two, and a third with its first token
    bench.step()
    assert (bench.scheduler.running, bench.scheduler.queued) == (1, 1)
    bench.finish()
    assert bench.tokens("b") == oracle(prompt(8, 50), 3)


# ── the order of the queue ──────────────────────────────────────────────────────────────────────────────────────────
def _crowd() -> Bench:
    """Ten pages: `runs` holds six of them for long, `big` wants eight and waits, and small ones keep coming."""
    bench = Bench({"num_pages": 10, "max_seq_len": 40, "max_prefill_tokens": 64})
    bench.submit("runs", prompt(20), most=20)
    bench.step()
    bench.submit("big", prompt(28, 100), most=2)
    return bench


def test_later_ones_that_fit_overtake_a_bounded_number_of_times() -> None:
    bench = _crowd()
    for number in range(MOST_OVERTAKES + 4):
        bench.submit(f"s{number}", prompt(2, 1000 + 10 * number), most=1)
    bench.finish()
    order = list(dict.fromkeys(w.request_id for plan in bench.runner.plans for w in plan.work))
    assert order.index("big") == 1 + MOST_OVERTAKES
    assert order[1 : 1 + MOST_OVERTAKES] == [f"s{number}" for number in range(MOST_OVERTAKES)]
    assert len(bench.tokens("big")) == 2


def test_nobody_overtakes_one_that_was_put_back() -> None:
    bench = Bench({"num_pages": 8, "max_seq_len": 32})
    bench.submit("old", prompt(8), most=20)
    bench.submit("new", prompt(8, 50), most=16)
    while not bench.scheduler.queued:
        bench.step()
    bench.submit("small", prompt(2, 90), most=1)
    while bench.scheduler.queued == 2:
        plan = bench.step()
        assert plan is not None and "small" not in {w.request_id for w in plan.work}
    bench.finish()
    assert len(bench.tokens("new")) == 16 and len(bench.tokens("small")) == 1


def test_a_queue_that_cannot_start_is_not_asked_again_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _crowd()
    tried: list[str] = []
    attach = bench.scheduler.pages.attach
    monkeypatch.setattr(bench.scheduler.pages, "attach", lambda request: (tried.append(request.id), attach(request)))
    for _ in range(12):
        bench.step()
    assert tried == ["big"]
    bench.scheduler.cancel("runs")
    bench.finish()
    assert tried == ["big", "big"] and len(bench.tokens("big")) == 2


# ── the pool shrinks and grows ──────────────────────────────────────────────────────────────────────────────────────
def test_a_pool_that_shrinks_puts_back_those_on_its_pages_and_they_go_on() -> None:
    bench = Bench({"num_pages": 16, "max_seq_len": 64})
    for name, begin in (("a", 0), ("b", 100), ("c", 200)):
        bench.submit(name, prompt(12, begin), most=10)
    for _ in range(4):
        bench.step()
    bench.scheduler.resize(6)
    assert bench.scheduler.pages.total == 6
    bench.finish()
    for name in "abc":
        last = bench.last(name)
        assert isinstance(last, Tokens) and last.limited_by is None and len(bench.tokens(name)) == 10
    assert all(page < 6 for plan in bench.runner.plans[4:] for w in plan.work for page in w.pages)
    bench.scheduler.resize(16)
    bench.submit("long", prompt(50, 300), most=2)
    bench.finish()
    assert len(bench.tokens("long")) == 2 and bench.all_pages_back()


def test_what_can_never_fit_a_shrunken_pool_fails_with_both_numbers_and_others_go_on() -> None:
    bench = Bench({"num_pages": 16, "max_seq_len": 64, "max_prefill_tokens": 64})
    bench.submit("long", prompt(40), most=10)
    bench.submit("short", prompt(5, 100), most=4)
    bench.step()
    bench.scheduler.resize(8)
    bench.finish()
    last = bench.last("long")
    assert isinstance(last, Failed) and last.code == "CONTEXT_LENGTH_EXCEEDED"
    assert (last.numbers["prompt_tokens"], last.numbers["pool_tokens"]) == (40, 32)
    assert "41" in last.detail and "32" in last.detail
    assert len(bench.tokens("short")) == 4
