"""Mixtral: attention of Mistral, the chosen experts' softmax weights made to sum to one. Pure.

Facts: transformers 5.24, MixtralConfig and MixtralForCausalLM, and the model's files.
"""

from __future__ import annotations

from freetoken.catalog.families.llama import decoder, head_counts, layer_count, optional_head_dim, optional_window
from freetoken.catalog.hf import Config
from freetoken.catalog.names import NameMap, Rename
from freetoken.catalog.spec import Attention, Branch, ModelSpec, Routed, Router

NAMES: NameMap = (
    Rename(r"\.block_sparse_moe\.experts\.(\d+)\.w1\.", r".ffn.experts.\1.gate."),
    Rename(r"\.block_sparse_moe\.experts\.(\d+)\.w3\.", r".ffn.experts.\1.up."),
    Rename(r"\.block_sparse_moe\.experts\.(\d+)\.w2\.", r".ffn.experts.\1.down."),
    Rename(r"\.block_sparse_moe\.gate\.weight$", ".ffn.experts.router.weight"),
    Rename(r"\.block_sparse_moe\.e_score_correction_bias$", ".ffn.experts.router.choice_bias"),
)
"""w1, w3, w2 for gate, up, down: also the spelling of MiniMax-M2."""


def read_mixtral(config: Config) -> tuple[ModelSpec, NameMap]:
    """Every layer is routed; intermediate_size is one expert's width."""
    heads, kv_heads = head_counts(config)
    head_dim = optional_head_dim(config)
    mixer = Attention(heads, kv_heads, head_dim, "main", head_dim**-0.5, window=optional_window(config))
    experts = config.integer("num_local_experts", most=65536)
    router = Router(experts, config.integer("num_experts_per_tok", most=experts))
    ffn = (Branch("experts", Routed(router, config.integer("intermediate_size"))),)
    spec, names = decoder(config, ((mixer, ffn),) * layer_count(config), head_dim, theta=1e6)
    return spec, (*names, *NAMES)
