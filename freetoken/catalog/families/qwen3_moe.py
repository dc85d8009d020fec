"""Qwen3-MoE: attention of Qwen3, softmax-routed experts on most layers. Pure.

Facts: transformers 5.24, Qwen3MoeConfig and Qwen3MoeForCausalLM. Class defaults are not the models': head_dim and
norm_topk_prob must be in the file.
"""

from __future__ import annotations

from freetoken.catalog.families.llama import decoder, head_counts, layer_count
from freetoken.catalog.hf import Config
from freetoken.catalog.names import Cut, NameMap, Rename, Unstack
from freetoken.catalog.spec import Attention, Branch, Dense, ModelSpec, NormSpec, Routed, Router

EXPERTS: NameMap = (
    Rename(r"\.mlp\.gate\.weight$", ".ffn.experts.router.weight"),
    Rename(r"\.mlp\.gate\.e_score_correction_bias$", ".ffn.experts.router.choice_bias"),
    Rename(r"\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.", r".ffn.experts.\1.\2."),
    Rename(r"\.mlp\.shared_experts?\.(gate|up|down)_proj\.", r".ffn.shared.\1."),
    Rename(r"\.mlp\.shared_expert_gate\.", ".ffn.shared.mix."),
)
"""The names of most routed families, one tensor for each expert."""


def packed_experts(width: int) -> NameMap:
    """All experts of a layer in one tensor, (E, out, in), gate rows before up rows."""
    return (
        Unstack(r"\.mlp\.experts\.gate_up_proj$", ".ffn.experts.{e}.gate_up.weight"),
        Unstack(r"\.mlp\.experts\.down_proj$", ".ffn.experts.{e}.down.weight"),
        Cut(r"\.gate_up\.weight$", ((".gate.weight", width), (".up.weight", width))),
    )


def read_qwen3_moe(config: Config) -> tuple[ModelSpec, NameMap]:
    """Layers in mlp_only_layers, and those that decoder_sparse_step skips, are dense."""
    head_dim, width = config.integer("head_dim"), config.integer("moe_intermediate_size")
    mixer = _attention(config, head_dim)
    experts = (Branch("experts", Routed(_router(config), width)),)
    dense_layers, step = config.integers("mlp_only_layers"), config.integer("decoder_sparse_step", 1)
    routed = [number not in dense_layers and (number + 1) % step == 0 for number in range(layer_count(config))]
    dense = () if all(routed) else (Branch("dense", Dense(config.integer("intermediate_size"))),)
    spec, names = decoder(config, tuple((mixer, experts if moe else dense) for moe in routed), head_dim)
    return spec, (*names, *EXPERTS, *packed_experts(width))


def _attention(config: Config, head_dim: int) -> Attention:
    heads, kv_heads = head_counts(config)
    bias = config.flag("attention_bias", False)
    return Attention(
        heads,
        kv_heads,
        head_dim,
        rope="main",
        scale=head_dim**-0.5,
        window=config.integer("sliding_window") if config.flag("use_sliding_window", False) else None,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=NormSpec(config.number("rms_norm_eps")),
    )


def _router(config: Config) -> Router:
    key = "num_experts" if config.has("num_experts") else "num_local_experts"
    experts = config.integer(key, most=65536)
    return Router(experts, config.integer("num_experts_per_tok", most=experts), renorm=config.flag("norm_topk_prob"))
