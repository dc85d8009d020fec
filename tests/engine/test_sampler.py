"""Each sampling parameter against an oracle nobody here wrote, and the statistics of draws."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core.errors import EngineError
from freetoken.core.types import SamplingParams
from freetoken.engine.runner.sampler import Sampler, cut, penalised, uniform
from freetoken.engine.step import Work

torch.set_num_threads(1)

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)


def _logits(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _work(sampling: SamplingParams, *, position: int = 5, history: tuple[int, ...] = (), prompt_len: int = 0) -> Work:
    return Work("r", (1,), position - 1, (0,), True, sampling, history, prompt_len)


def _sample(logits: torch.Tensor, sampling: SamplingParams, **work: object) -> int:
    return Sampler(len(logits))(logits[None], [_work(sampling, **work)])[0].token_id  # type: ignore[arg-type]


# ── cuts: transformers' warpers ─────────────────────────────────────────────────────────────────────────────────────
@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.1, 3.0),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
)
@settings(max_examples=80, deadline=None)
def test_cuts_are_transformers_warpers(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = _logits(seed)[None].double()
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(None, scores)
    ours = cut(_logits(seed), SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    torch.testing.assert_close(ours / ours.sum(), scores[0].softmax(-1), rtol=1e-6, atol=1e-9)


def test_a_nucleus_larger_than_the_first_candidates() -> None:
    logits = torch.zeros(5000) + torch.linspace(0, 0.1, 5000)
    kept = int((cut(logits, SamplingParams(top_p=0.9)) > 0).sum())
    ordered = logits.softmax(-1).double().sort(descending=True).values.cumsum(0)
    assert kept == int((ordered < 0.9).sum()) + 1 > 1024


# ── penalties and bias ──────────────────────────────────────────────────────────────────────────────────────────────
@given(seed=st.integers(0, 999), penalty=st.floats(0.5, 2.0), history=st.lists(st.integers(0, VOCAB - 1), max_size=20))
@settings(max_examples=40, deadline=None)
def test_repetition_penalty_is_transformers(seed: int, penalty: float, history: list[int]) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = _logits(seed)
    expected = logits
    if history:
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits[None].clone())[0]
    ours = penalised(logits, SamplingParams(repetition_penalty=penalty), history, len(history) // 2)
    torch.testing.assert_close(ours, expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits, history = _logits(0), (3, 3, 4, 7, 7, 7, 9)
    ours = penalised(logits, SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), history, prompt_len=3)
    for token in range(VOCAB):  # OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence
        count = history[3:].count(token)
        assert float(ours[token]) == pytest.approx(float(logits[token]) - count * 0.25 - (count > 0) * 0.5, abs=1e-5)


def test_penalties_change_a_greedy_choice_and_leave_the_logits_alone() -> None:
    logits = torch.tensor([1.0, 2.0, 1.9])
    kept = logits.clone()
    assert _sample(logits, GREEDY) == 1
    penalty = replace(GREEDY, presence_penalty=0.5)
    assert _sample(logits, penalty, history=(1,), prompt_len=0) == 2
    assert _sample(logits, penalty, history=(1,), prompt_len=1) == 1
    assert torch.equal(logits, kept)


def test_logit_bias_forces_and_forbids_and_ignores_unknown_ids() -> None:
    logits = _logits(1)
    best = int(logits.argmax())
    assert _sample(logits, replace(GREEDY, logit_bias=((17, 100.0),))) == 17
    assert _sample(logits, replace(GREEDY, logit_bias=((best, -100.0),))) == int(logits.topk(2).indices[1])
    assert _sample(logits, replace(GREEDY, logit_bias=((VOCAB + 3, 100.0), (-1, 100.0)))) == best


# ── draws ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_greedy_takes_the_first_of_equals() -> None:
    assert _sample(torch.tensor([0.0, 2.0, 2.0, 1.0]), GREEDY) == 1


@pytest.mark.parametrize("seeded", [True, False])
def test_draws_follow_the_probabilities(seeded: bool) -> None:
    logits, draws = torch.tensor([0.0, 1.0, 2.0, -1.0, float("-inf")]), 6_000
    sampler = Sampler(5)
    params = SamplingParams(temperature=1.3, seed=11 if seeded else None)
    counts = Counter(sampler(logits[None], [_work(params, position=p)])[0].token_id for p in range(1, draws + 1))
    expected = (logits / 1.3).softmax(-1)
    for token in range(5):
        deviation = math.sqrt(draws * float(expected[token]) + 1)
        assert abs(counts[token] - draws * float(expected[token])) < 5 * deviation


def test_uniform_is_uniform_and_its_own_for_each_seed_and_position() -> None:
    draws = sorted(uniform(seed, position) for seed in range(-50, 50) for position in range(100))
    distance = max(abs(value - rank / len(draws)) for rank, value in enumerate(draws))
    assert distance < 1.95 / math.sqrt(len(draws))  # Kolmogorov-Smirnov at 0.1 %
    assert len(set(draws)) == len(draws) and draws[0] >= 0 and draws[-1] < 1
    assert uniform(2**70 + 5, 3) == uniform(2**70 + 5, 3)  # any integer is a seed


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    params = SamplingParams(seed=42, temperature=3.0)
    rows = torch.stack([_logits(seed) for seed in range(6)])
    alone = [_sample(rows[i], params, position=7 + i) for i in range(6)]
    sampler = Sampler(VOCAB)
    sampler(rows[:2], [_work(SamplingParams())] * 2)  # draws of others in between
    batch = [_work(replace(params) if i % 2 else params, position=7 + i) for i in range(6)]
    assert [one.token_id for one in sampler(rows, batch)] == alone
    assert len({_sample(rows[0], replace(params, seed=s)) for s in range(40)}) > 10


def test_unseeded_requests_differ_between_processes_and_calls() -> None:
    flat = torch.zeros(1, 1000)
    one, two = Sampler(1000), Sampler(1000)
    work = [_work(SamplingParams())]
    assert [one(flat, work)[0].token_id for _ in range(8)] != [two(flat, work)[0].token_id for _ in range(8)]


def test_logits_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(EngineError, match="finite"):
        _sample(torch.full((VOCAB,), float("nan")), SamplingParams(seed=1))


# ── logprobs ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = _logits(3)
    params = SamplingParams(temperature=0.2, top_k=3, seed=1, logit_bias=((4, 50.0),), logprobs=5)
    sampled = Sampler(VOCAB)(logits[None], [_work(params)])[0]
    raw = logits.log_softmax(-1)
    assert sampled.token_id == 4 and sampled.logprob is not None
    assert sampled.logprob.token_id == 4 and sampled.logprob.logprob == pytest.approx(float(raw[4]), abs=1e-6)
    assert [token for token, _ in sampled.logprob.top] == raw.topk(5).indices.tolist()
    assert [value for _, value in sampled.logprob.top] == pytest.approx(raw.topk(5).values.tolist(), abs=1e-6)


def test_logprobs_only_where_asked_and_mixed_batches_keep_their_rows() -> None:
    rows = torch.stack([_logits(4), _logits(5), _logits(6)])
    asked = replace(GREEDY, logprobs=0)
    found = Sampler(VOCAB)(rows, [_work(GREEDY), _work(asked), _work(SamplingParams(top_k=1, seed=3))])
    assert [one.token_id for one in found] == rows.argmax(-1).tolist()
    assert [one.logprob is None for one in found] == [True, False, True]
    assert found[1].logprob is not None and found[1].logprob.top == ()
    assert Sampler(VOCAB)(torch.empty(0, VOCAB), []) == []
