"""Dense decoders of the Llama line: llama, mistral, qwen2, qwen3. Pure.

They differ in biases, q/k norms, where the head size comes from and which layers slide; each is a row of DENSE.
Facts: transformers 5.24 (configuration and modelling files of the four) and the model cards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freetoken.catalog.hf import Config, rope_spec
from freetoken.catalog.names import Drop, NameMap, Rename
from freetoken.catalog.spec import (
    Attention,
    Branch,
    Dense,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
)

PROLOGUE: NameMap = (
    Drop(
        r"^(model\.)?(visual|vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector|patch_merge_mlp)\."
    ),
    Drop(r"^(model\.)?mtp\."),
    Drop(r"\.rotary_emb\.inv_freq$"),  # a buffer that old files carry; it follows from the configuration
    Rename(r"^model\.language_model\.", "model."),
    Rename(r"^language_model\.model\.", "model."),
    Rename(r"^language_model\.lm_head\.", "lm_head."),
    Rename(r"^model\.embed_tokens\.", "embed."),
    Rename(r"^lm_head\.", "head."),
    Rename(r"^model\.norm\.", "head.norm."),
    Rename(r"^model\.layers\.", "layers."),
    Rename(r"\.self_attn\.([qkvo])_proj\.", r".mixer.\1."),
    Rename(r"\.self_attn\.([qk])_norm\.", r".mixer.\1_norm."),
    Rename(r"\.input_layernorm\.", ".pre_mixer."),
    Rename(r"\.post_attention_layernorm\.", ".pre_ffn."),
    Rename(r"\.mlp\.(gate|up|down)_proj\.", r".ffn.dense.\1."),
)
"""Names that all Llama-like files share, and what a text model leaves out of a multimodal one."""

Bias = Literal["attention_bias", "always", "never"]


@dataclass(frozen=True, slots=True)
class DenseRow:
    """How one dense family differs from the others."""

    qkv_bias: Bias = "never"
    o_bias: Bias = "never"
    qk_norm: bool = False
    head_dim: Literal["optional", "needed"] = "optional"  # optional: hidden / heads where the file gives none
    window: Literal["none", "all", "by_layer"] = "none"
    mlp_bias: bool = False  # reads mlp_bias


DENSE: dict[str, DenseRow] = {
    "llama": DenseRow(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias=True),
    "mistral": DenseRow(window="all"),
    "qwen2": DenseRow(qkv_bias="always", window="by_layer"),
    "qwen3": DenseRow("attention_bias", "attention_bias", qk_norm=True, head_dim="needed", window="by_layer"),
}


def read_dense(config: Config) -> tuple[ModelSpec, NameMap]:
    """The reader of all four; the row is chosen by model_type."""
    row = DENSE[config.text("model_type")]
    windows = _windows(config, row)
    mlp = Dense(config.integer("intermediate_size"), bias=row.mlp_bias and config.flag("mlp_bias", False))
    ffn = (Branch("dense", mlp),)
    head_dim = config.integer("head_dim") if row.head_dim == "needed" else optional_head_dim(config)
    mixers = {window: _attention(config, row, head_dim, window) for window in set(windows)}
    return decoder(config, tuple((mixers[window], ffn) for window in windows), head_dim)


def decoder(
    config: Config, layers: tuple[tuple[Attention, tuple[Branch, ...]], ...], head_dim: int, *, theta: float = 1e4
) -> tuple[ModelSpec, NameMap]:
    """The frame that Llama-like models share, around (mixer, ffn) of each layer."""
    config.refuse("hidden_act", "silu", "swish")
    norm = NormSpec(config.number("rms_norm_eps"))
    tied = config.flag("tie_word_embeddings", False)
    spec = ModelSpec(
        hidden=config.integer("hidden_size"),
        layers=tuple(LayerSpec(mixer, ffn, norm, norm) for mixer, ffn in layers),
        embed=EmbeddingSpec(config.integer("vocab_size")),
        head=HeadSpec(tied, norm),
        ropes={"main": rope_spec(config, head_dim, theta=theta)},
        max_positions=config.integer("max_position_embeddings"),
    )
    return spec, (*PROLOGUE, Drop(r"^head\.weight$")) if tied else PROLOGUE


def layer_count(config: Config) -> int:
    """num_hidden_layers; bounded, because a layer costs memory before any tensor is looked at."""
    return config.integer("num_hidden_layers", most=4096)


def head_counts(config: Config) -> tuple[int, int]:
    """(query heads, key-value heads); a file that gives no key-value heads has as many as query heads."""
    heads = config.integer("num_attention_heads")
    return heads, config.integer("num_key_value_heads", heads)


def optional_head_dim(config: Config) -> int:
    """head_dim, or hidden / heads where the file leaves it open."""
    return config.integer("head_dim", max(1, config.integer("hidden_size") // config.integer("num_attention_heads")))


def _attention(config: Config, row: DenseRow, head_dim: int, window: int | None) -> Attention:
    heads, kv_heads = head_counts(config)
    flags: dict[Bias, bool] = {
        "attention_bias": row.qkv_bias == "attention_bias" and config.flag("attention_bias", False),
        "always": True,
        "never": False,
    }
    return Attention(
        heads,
        kv_heads,
        head_dim,
        rope="main",
        scale=head_dim**-0.5,
        window=window,
        qkv_bias=flags[row.qkv_bias],
        o_bias=flags[row.o_bias],
        qk_norm=NormSpec(config.number("rms_norm_eps")) if row.qk_norm else None,
    )


def _windows(config: Config, row: DenseRow) -> tuple[int | None, ...]:
    """The sliding window of each layer, None for full attention."""
    layers = layer_count(config)
    if row.window == "all":
        if not config.has("sliding_window"):  # transformers would take 4096, newer models mean "none": ask
            raise config.invalid("sliding_window", None, "")
        return (optional_window(config),) * layers
    if row.window == "none" or not config.flag("use_sliding_window", False):
        return (None,) * layers
    window, kinds = config.integer("sliding_window"), config.texts("layer_types")
    if not kinds:
        first = config.integer("max_window_layers", least=0)
        return tuple(window if number >= first else None for number in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise config.invalid("layer_types", ", ".join(kinds), f"{layers} of full_attention or sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def optional_window(config: Config) -> int | None:
    """sliding_window; null or absent means full attention."""
    return None if config.values.get("sliding_window") is None else config.integer("sliding_window")
