"""expected(spec) for every kind of mixer, residual and injection, against what transformers allocates."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from freetoken.catalog import ngram
from freetoken.catalog.expected import expected, expert_count
from freetoken.catalog.spec import (
    Attention,
    Branch,
    Dense,
    EmbeddingSpec,
    GatedStreams,
    HeadSpec,
    IndexSpec,
    Latent,
    LayerSpec,
    ModelSpec,
    NGram,
    NormSpec,
    Plain,
    Pooled,
    Recurrent,
    Residual,
    Routed,
    Router,
    SinkhornStreams,
    TokenTable,
)

HIDDEN, VOCAB, LAYERS = 64, 160, 2
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
NORM = NormSpec()
DENSE = (Branch("dense", Dense(96)),)


def model(*layers: LayerSpec, tied: bool = False, residual: Residual | None = None, norm: bool = True) -> ModelSpec:
    head = HeadSpec(tied, NORM if norm else None)
    return ModelSpec(HIDDEN, layers, EmbeddingSpec(VOCAB), head, residual=residual or Plain())


def routed(router: Router, *more: Branch, bias: bool = False) -> tuple[Branch, ...]:
    return (Branch("experts", Routed(router, 32, bias=bias)), *more)


def latent(index: IndexSpec | None = None) -> Latent:
    return Latent(4, 32, 24, 16, 8, 12, "main", 1.0, index=index)


SIGMOID = Router(8, 2, "sigmoid", choice_bias=True)
BIASED = Router(8, 2, bias=True)
SHARED = Branch("shared", Dense(32))
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
RECURRENT = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
}
GDN = Recurrent(2, 4, 16, 8, 4, NORM)
GATED = Branch("shared", Dense(24), gated=True)
TOKENS = IndexSpec("tokens", 4, 16, 8, "main", NormSpec(kind="layer"))
BLOCKS = IndexSpec("block_mean", 4, 16, 3, "main", NORM, block=4)
STREAMED = NormSpec(group=HIDDEN)
V4 = {
    "n_routed_experts": 8,
    "intermediate_size": 32,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 3,
    "hc_mult": 3,
    "num_hash_layers": 1,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
}
PLE = {
    "hc_count": 3,
    "hc_lowrank": 16,
    "ple_layer_ids": [1],
    "ple_embed_dim": 64,
    "ngram_size": 3,
    "ngram_vocab_size_base": 128,
    "split_ngram_parts": 4,
    "heads_per_ngram": 4,
    "ple_conv_kernel_size": 4,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 12,
    "indexer_compress_ratio": 4,
}
GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "global_head_dim": 32,
    "tie_word_embeddings": True,
}


def pooled(ratio: int, index: IndexSpec | None = None) -> Pooled:
    return Pooled(4, 32, 32, 2, 16, 8, "main", 1.0, NORM, ratio, index)


def full(**fields: Any) -> Attention:
    return Attention(4, 2, fields.pop("head_dim", 16), "main", 0.25, **fields)


def gemma(head_dim: int) -> LayerSpec:
    mixer = full(head_dim=head_dim, qk_norm=NORM, v_norm=NormSpec(weight=False))
    return LayerSpec(mixer, DENSE, NORM, NORM, NORM, NORM, inject=TokenTable(12, NORM), out_scale=True)


CASES: dict[str, tuple[str, dict[str, Any], ModelSpec]] = {
    "latent": (
        "deepseek_v3",
        MLA,
        model(LayerSpec(latent(), DENSE, NORM, NORM), LayerSpec(latent(), routed(SIGMOID, SHARED), NORM, NORM)),
    ),
    "latent with index": (
        "glm_moe_dsa",
        MLA | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 4},
        model(
            LayerSpec(latent(TOKENS), DENSE, NORM, NORM),
            LayerSpec(latent(TOKENS), routed(SIGMOID, SHARED), NORM, NORM),
        ),
    ),
    "recurrent": (
        "qwen3_next",
        RECURRENT,
        model(
            LayerSpec(GDN, routed(Router(8, 2), GATED), NORM, NORM),
            LayerSpec(full(qk_norm=NORM, out_gate=True), routed(Router(8, 2), GATED), NORM, NORM),
        ),
    ),
    "pooled and sinkhorn streams": (
        "deepseek_v4",
        V4,
        model(
            LayerSpec(pooled(8), routed(Router(8, 2, table=True), SHARED), NORM, NORM),
            LayerSpec(
                pooled(4, IndexSpec("pooled", 4, 16, 3, "main")),
                routed(Router(8, 2, choice_bias=True), SHARED),
                NORM,
                NORM,
            ),
            residual=SinkhornStreams(3, 4, 1e-6, NORM),
        ),
    ),
    "n-grams and gated streams": (
        "qwen4_exp_text",
        RECURRENT | PLE,
        model(
            LayerSpec(
                GDN,
                routed(Router(8, 2), GATED),
                None,
                None,
                inject=NGram(0, 64, 3, 4, 128, 128, 1234, 4, 2, STREAMED),
            ),
            LayerSpec(full(qk_norm=NORM, out_gate=True, index=BLOCKS), routed(Router(8, 2), GATED), None, None),
            residual=GatedStreams(3, 16, STREAMED),
            norm=False,
        ),
    ),
    "token table": ("gemma4_text", GEMMA, model(gemma(16), gemma(32), tied=True)),
    "sinks and biases": (
        "gpt_oss",
        {"num_local_experts": 8, "intermediate_size": 32},
        model(
            *[
                LayerSpec(
                    full(qkv_bias=True, o_bias=True, sinks=True), routed(Router(8, 2, bias=True), bias=True), NORM, NORM
                )
            ]
            * 2
        ),
    ),
    "norms over the whole projection": (
        "minimax_m2",
        {"num_local_experts": 8, "intermediate_size": 32, "rotary_dim": 8},
        model(*[LayerSpec(full(qk_norm=NORM, qk_norm_scope="all"), routed(SIGMOID), NORM, NORM)] * 2),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_counts_every_number_that_transformers_allocates(case: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values, spec = CASES[case]
    if spec.layers[0].inject and isinstance(spec.layers[0].inject, TokenTable):
        spec = ModelSpec(HIDDEN, spec.layers, EmbeddingSpec(VOCAB, 1.0, VOCAB, 12, NORM), spec.head)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**BASE, **values}))
    derived = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")  # integers that ngram.py computes
    state = {name: x for name, x in theirs.state_dict().items() if not name.endswith(derived)}
    if spec.head.tied:
        state.pop("lm_head.weight", None)
    shapes = expected(spec)
    assert sum(prod(shape) for shape in shapes.values()) == sum(x.numel() for x in state.values())
    assert not [name for name, shape in shapes.items() if not all(shape)]


def test_layers_that_reuse_have_less() -> None:
    own = LayerSpec(full(qk_norm=NORM), DENSE, NORM, NORM)
    reading = LayerSpec(full(qk_norm=NORM, kv_from=0), DENSE, NORM, NORM)
    names = expected(model(own, reading))
    mine, theirs = ({n[9:] for n in names if n.startswith(f"layers.{i}.mixer")} for i in (0, 1))
    assert mine - theirs == {"mixer.k.weight", "mixer.v.weight", "mixer.k_norm.weight"}
    again = IndexSpec("tokens", 4, 16, 8, "main", NormSpec(kind="layer"), reuse=0)
    names = expected(model(LayerSpec(latent(TOKENS), DENSE, NORM, NORM), LayerSpec(latent(again), DENSE, NORM, NORM)))
    assert any(".0.mixer.index." in name for name in names)
    assert not any(".1.mixer.index." in name for name in names)


def test_expert_count_is_that_of_the_names() -> None:
    spec = CASES["recurrent"][2]
    ups = [name for name in expected(spec) if name.endswith(".up.weight") and ".experts." in name]
    assert expert_count(spec) == len(ups) == 16


# ── n-grams ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(("order", "base", "vocab"), [(0, 128, 160), (1, 128, 160), (2, 20_000, 151_936)])
def test_ngram_integers_are_those_of_transformers(order: int, base: int, vocab: int) -> None:
    from transformers import AutoConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    values = {**BASE, **RECURRENT, **PLE, "vocab_size": vocab, "ngram_vocab_size_base": base}
    config = AutoConfig.for_model("qwen4_exp_text", **values)
    theirs = Qwen4ExpTextNGramEmbedding(config, config.ple_embed_dim, 0, order)
    pad = config.make_ngram_vocab_size_divisible_by
    spec = NGram(order, 64, 3, 4, base, pad, config.seed, 4, 2, STREAMED)
    assert list(ngram.head_rows(spec)) == theirs.head_vocab_sizes
    assert list(ngram.head_offsets(spec)) == theirs.head_offsets
    assert list(ngram.multipliers(spec, vocab)) == theirs.layer_multipliers.tolist()
    assert ngram.table_shape(spec) == tuple(theirs.ngram_embedding.weight.shape)


def test_primes_are_primes() -> None:
    sieve = [True] * 10_000
    for n in range(2, 100):
        sieve[n * n :: n] = [False] * len(sieve[n * n :: n])
    primes = tuple(n for n in range(2, 10_000) if sieve[n])
    assert ngram._primes_from(0, len(primes)) == primes
    assert not any(map(ngram._is_prime, (3215031751, 3825123056546413051, 341550071728321)))  # strong pseudoprimes
