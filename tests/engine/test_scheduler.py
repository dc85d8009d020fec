"""The scheduler against a runner that checks what every page holds, and against the tokens that must come out."""

from __future__ import annotations

import pytest

from freetoken.core import errors
from freetoken.core.events import Failed, Progress, Tokens
from freetoken.core.types import FinishReason
from freetoken.engine.paging.rules import Demand, Layout
from freetoken.engine.scheduler.admission import demand
from tests.fakes.runner import oracle
from tests.fakes.schedule import Bench, prompt


def test_one_request_streams_the_oracle_and_frees_its_pages() -> None:
    bench = Bench()
    bench.submit("a", prompt(10), most=5)
    bench.finish()
    assert bench.tokens("a") == oracle(prompt(10), 5)
    assert bench.last("a").finish is FinishReason.LENGTH  # type: ignore[union-attr]
    assert bench.last("a").limited_by is None  # type: ignore[union-attr]
    assert bench.first_tokens("a").cached == 0
    assert [event.cached for event in bench.said["a"] if isinstance(event, Tokens)][1:] == [None] * 4
    assert bench.all_pages_back()


def test_eos_ends_without_being_sent_and_is_ignored_on_request() -> None:
    first, second, third = oracle(prompt(10), 3)
    bench = Bench()
    bench.submit("stops", prompt(10), eos_ids=(third,))
    bench.submit("goes on", prompt(10), most=6, eos_ids=(third,), ignore_eos=True)
    bench.finish()
    assert bench.tokens("stops") == [first, second]
    assert bench.last("stops") == Tokens((), finish=FinishReason.STOP)
    assert bench.tokens("goes on") == oracle(prompt(10), 6)


def test_prefill_is_cut_into_chunks_with_progress_while_others_decode() -> None:
    bench = Bench({"max_prefill_tokens": 7})
    bench.submit("short", prompt(3), most=20)
    bench.step()
    bench.submit("long", prompt(30, 100), most=2)
    plans = [bench.step() for _ in range(5)]
    assert [{w.request_id: len(w.token_ids) for w in plan.work} for plan in plans if plan] == [
        {"short": 1, "long": 7},
        {"short": 1, "long": 7},
        {"short": 1, "long": 7},
        {"short": 1, "long": 7},
        {"short": 1, "long": 2},
    ]
    assert [e for e in bench.said["long"] if isinstance(e, Progress)] == [
        Progress(done, 30) for done in (7, 14, 21, 28, 30)
    ]
    bench.finish()
    assert bench.tokens("short") == oracle(prompt(3), 20)
    assert bench.tokens("long") == oracle(prompt(30, 100), 2)


def test_the_same_prompt_again_is_found_up_to_its_last_token() -> None:
    bench = Bench()
    bench.submit("first", prompt(32), most=4)
    bench.finish()
    computed = bench.runner.computed
    bench.submit("again", prompt(32), most=4)
    bench.finish()
    assert bench.first_tokens("again").cached == 28  # 7 of 8 pages: the last token must be computed
    assert bench.runner.computed - computed == 4 + 3
    assert bench.tokens("again") == bench.tokens("first") == oracle(prompt(32), 4)


def test_a_follow_up_finds_the_answer_too() -> None:
    bench = Bench()
    bench.submit("turn 1", prompt(9), most=9)
    bench.finish()
    follow_up = prompt(9) + bench.tokens("turn 1") + [7]
    bench.submit("turn 2", follow_up, most=3)
    bench.finish()
    assert bench.first_tokens("turn 2").cached == 16  # 17 computed positions fill 4 pages
    assert bench.tokens("turn 2") == oracle(follow_up, 3)


def test_parallel_requests_share_what_the_first_has_computed() -> None:
    bench = Bench({"max_prefill_tokens": 8, "max_running_requests": 8})
    for name in "abcdefgh":
        bench.submit(name, [*prompt(40), ord(name)], most=3)
    bench.finish()
    assert bench.runner.computed < 40 + 8 * (8 + 3) + 8
    for name in "abcdefgh":
        assert bench.tokens(name) == oracle([*prompt(40), ord(name)], 3)
    assert sum(bench.first_tokens(name).cached == 40 for name in "abcdefgh") >= 6


def test_no_more_than_max_running_requests_run() -> None:
    bench = Bench({"max_running_requests": 2})
    for name in "abc":
        bench.submit(name, prompt(4, ord(name)), most=6)
    plan = bench.step()
    assert plan is not None and [w.request_id for w in plan.work] == ["a", "b"]
    assert (bench.scheduler.running, bench.scheduler.queued) == (2, 1)
    bench.finish()
    assert bench.tokens("c") == oracle(prompt(4, ord("c")), 6)


def test_pages_out_preempts_the_newest_which_comes_back_with_the_right_tokens() -> None:
    bench = Bench({"num_pages": 8, "max_seq_len": 32})
    bench.submit("old", prompt(8), most=16)
    bench.submit("new", prompt(8, 50), most=16)
    bench.finish()
    for name, begin in (("old", 0), ("new", 50)):
        assert bench.tokens(name) == oracle(prompt(8, begin), 16)
        assert bench.last(name).finish is FinishReason.LENGTH  # type: ignore[union-attr]
        assert bench.last(name).limited_by is None  # type: ignore[union-attr]
    ended = [name for plan in bench.runner.plans for name in (w.request_id for w in plan.work)]
    assert ended.index("new") < len(ended) and ended[-1] == "new"  # it ended last: it had been put back
    assert sum(len(w.token_ids) for p in bench.runner.plans for w in p.work) > 8 + 8 + 15 + 15  # and recomputed
    assert bench.all_pages_back()


def test_demand_is_the_prompt_and_one_page_and_only_the_tokens_for_one_that_comes_back() -> None:
    rule = Layout(4)
    assert [demand(tokens, rule).pages for tokens in (1, 4, 5, 28)] == [2, 2, 3, 8]
    assert demand(28, rule, held=Demand(6)).pages == 2
    whole = Demand(pages=8)
    assert demand(32, rule, resumed=True).fits(whole) and not demand(32, rule).fits(whole)


def test_a_preempted_request_comes_back_before_those_that_came_after_it() -> None:
    bench = Bench({"num_pages": 8, "max_seq_len": 32, "max_running_requests": 2})
    bench.submit("old", prompt(8), most=16)
    bench.submit("new", prompt(8, 50), most=16)
    bench.submit("late", prompt(8, 80), most=1)
    bench.finish()
    order = [w.request_id for plan in bench.runner.plans for w in plan.work]
    assert order.index("late") > max(place for place, name in enumerate(order) if name == "old")
    back = next(place for place, plan in enumerate(bench.runner.plans) if "late" in {w.request_id for w in plan.work})
    assert "new" in {w.request_id for w in bench.runner.plans[back].work}
    assert bench.tokens("new") == oracle(prompt(8, 50), 16)


def test_what_a_preempted_request_had_computed_itself_is_not_called_cached() -> None:
    bench = Bench({"num_pages": 8, "max_seq_len": 32, "max_prefill_tokens": 2})
    bench.submit("old", prompt(2), most=12)
    bench.submit("new", prompt(24, 50), most=3)
    bench.finish()
    runs = [w for plan in bench.runner.plans for w in plan.work if w.request_id == "new"]
    gap = ["new" in {w.request_id for w in plan.work} for plan in bench.runner.plans]
    assert False in gap[gap.index(True) : -1]  # it was put back in the middle of its prompt
    assert sum(len(w.token_ids) for w in runs) < 24 + 3 + 4  # and found its own pages again
    assert bench.first_tokens("new").cached == 0
    assert bench.tokens("new") == oracle(prompt(24, 50), 3)


@pytest.mark.parametrize("window", [32, 1000])
def test_alone_with_the_whole_pool_it_ends_with_length_limited_by_the_pool(window: int) -> None:
    bench = Bench({"num_pages": 8, "max_seq_len": window})
    bench.submit("a", prompt(8), most=None)
    bench.finish()
    last = bench.last("a")
    assert isinstance(last, Tokens) and (last.finish, last.limited_by) == (FinishReason.LENGTH, "kv_pool")
    assert bench.tokens("a") == oracle(prompt(8), len(bench.tokens("a")))
    assert 24 <= len(bench.tokens("a")) <= 25
    assert bench.all_pages_back()


def test_the_window_ends_it_without_blaming_the_pool() -> None:
    bench = Bench({"max_seq_len": 20})
    bench.submit("a", prompt(8), most=None)
    bench.finish()
    assert len(bench.tokens("a")) == 12
    assert bench.last("a").limited_by is None  # type: ignore[union-attr]


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers_and_others_run() -> None:
    bench = Bench({"num_pages": 8, "max_seq_len": 1000})
    with pytest.raises(errors.ContextLengthExceeded) as refusal:
        bench.submit("a", prompt(29))  # 8 pages and one for output
    assert refusal.value.numbers == {"prompt_tokens": 29, "context_tokens": 1000, "pool_tokens": 32}
    assert "29" in refusal.value.detail and "32" in refusal.value.detail and "--num-tokens" in refusal.value.detail
    bench.submit("b", prompt(28), most=3)
    bench.finish()
    assert bench.tokens("b") == oracle(prompt(28), 3)


def test_a_prompt_as_long_as_the_window_is_refused_and_one_shorter_gets_its_token() -> None:
    bench = Bench({"max_seq_len": 12})
    with pytest.raises(errors.ContextLengthExceeded) as refusal:
        bench.submit("a", prompt(12))
    assert refusal.value.numbers["context_tokens"] == 12
    bench.submit("b", prompt(11))
    bench.finish()
    assert bench.tokens("b") == oracle(prompt(11), 1)


def test_queue_full_counts_those_that_cannot_run_at_once() -> None:
    bench = Bench({"max_running_requests": 2, "max_queued": 3})
    for number in range(5):
        bench.submit(str(number), prompt(4))
    with pytest.raises(errors.QueueFull) as refusal:
        bench.submit("one more", prompt(4))
    assert refusal.value.numbers == {"queued": 5, "max_queued": 3} and refusal.value.retry_after_s
    bench.finish()
    assert all(bench.tokens(str(number)) == oracle(prompt(4), 8) for number in range(5))


def test_waiting_past_the_deadline_fails_with_position_and_reason() -> None:
    bench = Bench({"max_running_requests": 1, "queue_deadline_s": 10.0})
    bench.submit("runs", prompt(4), most=100)
    bench.step()
    bench.submit("patient", prompt(4))
    bench.submit("hasty", prompt(4), deadline_ms=2000)
    bench.clock.now = 3.0
    bench.scheduler.expire()
    bench.listen()
    last = bench.last("hasty")
    assert isinstance(last, Failed) and last.code == "QUEUE_TIMEOUT" and last.numbers["position"] == 2
    assert "1 of at most 1 requests were running" in last.detail
    bench.clock.now = 10.0
    bench.scheduler.expire()
    bench.finish()
    assert bench.last("patient").code == "QUEUE_TIMEOUT"  # type: ignore[union-attr]
    assert bench.tokens("runs") == oracle(prompt(4), 100)


def test_waiting_for_pages_says_so() -> None:
    bench = Bench({"num_pages": 8, "max_seq_len": 32, "queue_deadline_s": 1.0})
    bench.submit("big", prompt(20), most=8)
    bench.step()
    bench.submit("next", prompt(20, 100))
    bench.step()
    bench.clock.now = 2.0
    bench.scheduler.expire()
    bench.listen()
    assert "KV pages" in bench.last("next").detail  # type: ignore[union-attr]


def test_cancel_frees_at_once_and_in_mid_step_when_the_step_ends() -> None:
    bench = Bench()
    bench.submit("a", prompt(12), most=50)
    bench.submit("b", prompt(12, 100), most=50)
    bench.step()
    assert bench.scheduler.cancel("a")
    assert not bench.scheduler.cancel("a")
    free = bench.scheduler.pages.available
    plan = bench.scheduler.next_plan()
    assert plan is not None
    bench.scheduler.cancel("b")
    assert bench.scheduler.pages.available == free  # the step still writes to b's pages
    bench.submit("b", prompt(12, 200), most=3)  # the id may come back while its former owner is in flight
    bench.scheduler.accept(plan, bench.runner.run(plan))
    assert bench.all_pages_back()
    bench.said.clear()
    bench.finish()
    assert bench.tokens("b") == oracle(prompt(12, 200), 3)


def test_a_smallest_step_that_fails_takes_only_its_own_request() -> None:
    bench = Bench({"max_running_requests": 1})
    bench.submit("a", prompt(12), most=50)
    bench.submit("b", prompt(6), most=3)
    plan = bench.scheduler.next_plan()
    assert plan is not None
    bench.scheduler.retry(plan, errors.OutOfMemory("no memory", numbers={"tokens": 12}))  # 12 is no more than the floor
    bench.finish()
    assert bench.last("a") == Failed("OUT_OF_MEMORY", "no memory", {"tokens": 12})
    assert bench.tokens("b") == oracle(prompt(6), 3)
    assert bench.all_pages_back()


def test_cancel_all_tells_everybody() -> None:
    bench = Bench({"max_running_requests": 1})
    bench.submit("a", prompt(12), most=50)
    bench.submit("b", prompt(6), most=3)
    bench.step()
    bench.scheduler.cancel_all()
    bench.listen()
    assert bench.last("a") == bench.last("b") == Tokens((), finish=FinishReason.CANCELLED)
    assert bench.all_pages_back() and not bench.scheduler.live_ids


@pytest.mark.parametrize(("ids", "names"), [([], "no tokens"), ([1], "already running")])
def test_a_request_without_sense_is_refused(ids: list[int], names: str) -> None:
    bench = Bench()
    bench.submit("a", [1], most=2)
    with pytest.raises(errors.UsageError, match=names):
        bench.submit("a" if ids else "b", ids)


def test_no_token_asked_gives_none() -> None:
    bench = Bench()
    bench.submit("a", [1, 2], most=0)
    bench.finish()
    assert bench.said["a"] == [Tokens((), cached=0, finish=FinishReason.LENGTH)]


def test_logprobs_and_history_go_where_they_are_asked_for() -> None:
    bench = Bench()
    bench.submit("a", prompt(6), most=3, logprobs=1)
    bench.submit("b", prompt(6), most=3, repetition_penalty=1.1)
    bench.finish()
    got = [event.logprobs[0].token_id for event in bench.said["a"] if isinstance(event, Tokens)]
    assert got == bench.tokens("a")
    histories = [w.history for plan in bench.runner.plans for w in plan.work if w.request_id == "b" and w.sample]
    assert [len(history) for history in histories] == [6, 7, 8]
    assert all(not w.history for plan in bench.runner.plans for w in plan.work if w.request_id == "a")


def test_totals_count_prompts_cached_and_output_tokens() -> None:
    bench = Bench()
    for name in "ab":
        bench.submit(name, prompt(16), most=4)
        bench.finish()
    totals = bench.scheduler.totals
    assert (totals.prompt, totals.cached, totals.output, totals.prefilled) == (32, 12, 8, 16 + 4)
