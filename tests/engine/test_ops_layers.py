"""Layers on their own: ropes against transformers' frequencies, the head's exact best logits, dispatch of experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from freetoken_kernels.reference.linear import Product
from freetoken_kernels.reference.pointwise import glu
from freetoken_kernels.reference.routing import mixture
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.catalog.spec import EmbeddingSpec, HeadSpec, RopeScaling, RopeSpec
from freetoken.engine.attention.base import Run, Spans
from freetoken.engine.experts.banks import ExpertBank
from freetoken.engine.experts.dispatch import Dispatch
from freetoken.engine.layers.embedding import SHARP, Embedding, Head
from freetoken.engine.layers.module import Weights
from freetoken.engine.layers.rope import inverse_frequencies

torch.set_num_threads(1)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "linear", "factor": 3.0}, RopeScaling("linear", 3.0)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            RopeScaling("llama3", 8.0, 8192, 1.0, 4.0),
        ),
        (
            {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096},
            RopeScaling("yarn", 40.0, 4096),
        ),
        (
            {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
            RopeScaling("yarn", 32.0, 4096, truncate=False),
        ),
    ],
)
def test_scaled_frequencies_are_transformers(rope: dict[str, Any], scaling: RopeScaling) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **rope},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    ours = inverse_frequencies(RopeSpec(500000.0, 128, scaling=scaling))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)


def test_longrope_chooses_by_the_planned_context() -> None:
    spec = RopeSpec(1e4, 4, scaling=RopeScaling("longrope", original=100, short=(1.0, 2.0), long=(4.0, 8.0)))
    short, long = inverse_frequencies(spec, 100), inverse_frequencies(spec, 101)
    torch.testing.assert_close(short, torch.tensor([1.0, 0.01 / 2]))
    torch.testing.assert_close(long, torch.tensor([1.0 / 4, 0.01 / 8]))


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_the_best_logits_are_exact_with_bf16_weights(rows: int) -> None:
    weights = Weights(torch.bfloat16)
    embedding = Embedding(EmbeddingSpec(2000), 96, weights)
    head = Head(HeadSpec(tied=True), embedding, weights)
    weights.destinations()["embed.weight"].copy_(_random(2000, 96) * 3)
    x = _random(rows, 96, seed=1)
    exact = x @ weights.destinations()["embed.weight"].float().t()
    logits, best = head(x), exact.topk(SHARP // 2).indices
    torch.testing.assert_close(logits.gather(1, best), exact.gather(1, best), rtol=1e-5, atol=1e-4)
    assert torch.equal(logits.argmax(-1), exact.argmax(-1))
    assert float((logits - exact).abs().max()) < 0.02 * float(exact.abs().max())


def _bank(bias: bool, dtype: torch.dtype, together: bool) -> ExpertBank:
    bank = ExpertBank.allocate(6, 16, 8, bias=bias, dtype=dtype, together=together)
    for seed, (_, view) in enumerate(bank.views()):
        view.copy_(_random(*view.shape, seed=seed) / 4)
    return bank


@given(
    tokens=st.integers(1, 70),
    top_k=st.integers(1, 6),
    bias=st.booleans(),
    half=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_dispatch_is_the_mixture_of_all_experts(tokens: int, top_k: int, bias: bool, half: bool, seed: int) -> None:
    bank = _bank(bias, torch.bfloat16 if half else torch.float32, together=top_k == 6 and seed % 2 == 0)
    views = {name: view.float() for name, view in bank.views()}
    x, weight = _random(tokens, 16, seed=seed), _random(tokens, top_k, seed=seed + 1)
    pick = _random(tokens, 6, seed=seed + 2).topk(top_k).indices
    pick = pick.sort(-1).values if top_k == 6 else pick

    def linear(e: int, name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ views[f"{e}.{name}.weight"].t() + (views[f"{e}.{name}.bias"] if bias else 0)

    outputs = torch.stack([linear(e, "down", glu(linear(e, "gate", x), linear(e, "up", x))) for e in range(6)])
    found = Dispatch(bank, glu, Product())(x, pick, weight)
    torch.testing.assert_close(
        found, mixture(pick, weight, outputs), rtol=0.05 if half else 1e-4, atol=0.2 if half else 1e-4
    )


@given(
    page=st.sampled_from([1, 4, 16]),
    start=st.integers(0, 40),
    length=st.integers(1, 300),
    window=st.one_of(st.none(), st.integers(1, 50)),
    scattered=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_spans_cover_what_a_query_may_see_and_no_page_more(
    page: int, start: int, length: int, window: int | None, scattered: bool
) -> None:
    count = -(-(start + length) // page)
    pages = torch.randperm(count, generator=torch.Generator().manual_seed(count)).tolist() if scattered else None
    table = tuple(pages or range(7, 7 + count))
    spans = Spans([Run(0, length, start, table)], page)
    (span,) = spans.of(window, 2)
    owner = {table[p // page] * page + p % page: p for p in range(start + length)}  # slot -> position
    slots = spans.slots
    written = list(range(slots.start, slots.stop)) if isinstance(slots, slice) else slots.tolist()
    assert [owner[slot] for slot in written] == list(range(start, start + length))
    keys, gathered = span.keys, span.keys.pages
    read = torch.arange(keys.first, keys.first + keys.count)
    if gathered is not None:
        read = (gathered[:, None] * page + torch.arange(page)).flatten()[read]
    positions = torch.tensor([owner[slot] for slot in read.tolist()])
    if window is not None:
        assert int(positions[0]) == max(0, start - window + 1)
    for block in span.blocks:
        seen = positions[block.keys]
        for row in range(block.rows.start, block.rows.stop):
            low = 0 if window is None else max(0, start + row - window + 1)
            offset = (row - block.rows.start) * 2
            visible = seen if block.mask is None else seen[block.mask[offset] == 0]
            assert visible.tolist() == list(range(low, start + row + 1))
            assert block.mask is None or torch.equal(block.mask[offset], block.mask[offset + 1])
    assert span.blocks[0].rows.start == 0 and span.blocks[-1].rows.stop == length
