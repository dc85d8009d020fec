"""GGUF metadata and names, said as a config.json and a NameMap, so that one reader a family serves both formats.

Facts: ggml-org/ggml docs/gguf.md (keys) and llama.cpp's gguf-py constants and converter (names; architecture `llama`
stores q and k rows permuted, also for Mistral and Mixtral, which it includes).
Does not know how the file is parsed (gguf.py) or what the configuration means (families/).
"""

from __future__ import annotations

import math
import struct

from freetoken.catalog.families.table import unsupported
from freetoken.catalog.gguf import GgufHeader
from freetoken.catalog.hf import Config
from freetoken.catalog.names import Drop, NameMap, Permuted, Rename, Unstack
from freetoken.core.errors import ConfigInvalid, FileCorrupt, UnsupportedEncoding

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""general.architecture -> model_type; `llama` with experts is mixtral, with a sliding window mistral."""

_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
"""Metadata key under the architecture's prefix -> config.json key of the same meaning."""

_NEUTRAL = {
    "attention.scale": None,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "attention.logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
    "logit_scale": None,
    "residual_scale": None,
    "embedding_scale": None,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "use_parallel_residual": False,
}
"""Keys that would change what is computed, with the value at which they do not."""

_FREQUENCIES = "rope_freqs.weight"  # a divisor for each frequency: Llama 3's scaling, computed by the converter

_NAMES: NameMap = (
    Drop(r"^rope_freqs\.weight$"),
    Drop(r"\.attn_rot_embd$"),
    Rename(r"^token_embd\.", "embed."),
    Rename(r"^output_norm\.", "head.norm."),
    Rename(r"^output\.", "head."),
    Rename(r"^blk\.", "layers."),
    Rename(r"\.attn_norm\.", ".pre_mixer."),
    Rename(r"\.ffn_norm\.", ".pre_ffn."),
    Rename(r"\.attn_([qkv])\.", r".mixer.\1."),
    Rename(r"\.attn_([qk])_norm\.", r".mixer.\1_norm."),
    Rename(r"\.attn_output\.", ".mixer.o."),
    Rename(r"\.ffn_gate_inp\.", ".ffn.experts.router."),
    Unstack(r"\.ffn_(gate|up|down)_exps\.weight$", r".ffn.experts.{e}.\1.weight"),
    Rename(r"\.ffn_(gate|up|down)\.(\d+)\.weight$", r".ffn.experts.\2.\1.weight"),  # files of before April 2024
    Rename(r"\.ffn_(gate|up|down)\.", r".ffn.dense.\1."),
)


def as_config(header: GgufHeader) -> Config:
    """The file's facts under config.json's keys. Raises UnsupportedArchitecture, UnsupportedEncoding, ConfigInvalid."""
    metadata = Config(header.metadata, header.path.name)
    architecture = metadata.text("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise unsupported(architecture)
    parts = metadata.integer("split.count", 1, least=0)
    if parts > 1:
        raise UnsupportedEncoding(
            f"{header.path.name} is one of {parts} parts of a model; a model in one file is supported",
            fixes=("join the parts with llama.cpp's `llama-gguf-split --merge`",),
        )
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    facts = Config(own, f"{header.path.name}: {architecture}")
    for key, neutral in _NEUTRAL.items():
        facts.refuse(key, *(() if neutral is None else (neutral,)))
    values: dict[str, object] = {name: own[key] for key, name in _KEYS.items() if key in own}
    values["model_type"] = _model_type(architecture, facts)
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    values["attention_bias"] = "blk.0.attn_q.bias" in header.tensors  # no key says it: llama.cpp adds what it finds
    values["mlp_bias"] = "blk.0.ffn_down.bias" in header.tensors
    values.setdefault("vocab_size", _vocabulary(metadata))
    values["num_key_value_heads"] = _same_everywhere(facts, "attention.head_count_kv")
    values.setdefault("norm_topk_prob", True)  # what llama.cpp computes where the file does not say
    values["use_sliding_window"] = "sliding_window" in values
    values["max_window_layers"] = 0
    config = Config(values, header.path.name)
    values["rope_parameters"] = _rope(header, facts, config)
    return config


def gguf_names(header: GgufHeader, config: Config) -> NameMap:
    """The map from the file's names, for the configuration that as_config made."""
    if header.metadata["general.architecture"] != "llama":
        return _NAMES
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    return (*_NAMES, Permuted(r"\.mixer\.q\.", heads), Permuted(r"\.mixer\.k\.", kv_heads))


def _model_type(architecture: str, facts: Config) -> str:
    if architecture == "llama" and facts.integer("expert_count", 0, least=0) > 0:
        return "mixtral"
    if architecture == "llama" and facts.has("attention.sliding_window"):
        return "mistral"
    return _MODEL_TYPES[architecture]


def _vocabulary(metadata: Config) -> int | None:
    tokens = metadata.values.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _same_everywhere(facts: Config, key: str) -> object:
    """The value of a key that may be given for each layer. Raises ConfigInvalid where layers differ."""
    value = facts.values.get(key)
    if not isinstance(value, list):
        return value
    if len(set(map(str, value))) != 1:
        raise facts.invalid(key, value, "the same for every layer")
    return value[0]


def _rope(header: GgufHeader, facts: Config, config: Config) -> dict[str, object]:
    """The scaling of the rotary embedding, as rope_parameters."""
    head_dim = config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
    for key in ("attention.value_length", "rope.dimension_count"):
        facts.refuse(key, head_dim)
    kind = facts.text("rope.scaling.type", "none")
    if _FREQUENCIES in header.tensors:
        if kind != "none":
            raise facts.invalid("rope.scaling.type", kind, f"none beside {_FREQUENCIES}")
        return _by_frequency(_frequencies(header, head_dim))
    match kind:
        case "none":
            return {}
        case "linear":
            return {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}
        case "yarn":
            return _yarn(facts)
    raise facts.invalid("rope.scaling.type", kind, "none, linear or yarn")


def _yarn(facts: Config) -> dict[str, object]:
    given = {
        "factor": facts.number("rope.scaling.factor"),
        "original_max_position_embeddings": facts.values.get("rope.scaling.original_context_length"),
        "attention_factor": facts.values.get("rope.scaling.attn_factor"),
        "beta_fast": facts.values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": facts.values.get("rope.scaling.yarn_beta_slow"),
    }
    return {"rope_type": "yarn"} | {key: value for key, value in given.items() if value is not None}


def _by_frequency(divisors: tuple[float, ...]) -> dict[str, object]:
    """One divisor a frequency is what longrope's lists are; both lengths get the same one, and attention no factor."""
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "short_factor": list(divisors),
        "long_factor": list(divisors),
    }


def _frequencies(header: GgufHeader, head_dim: int) -> tuple[float, ...]:
    tensor = header.tensors[_FREQUENCIES]
    if tensor.encoding != "F32" or tensor.shape != (head_dim // 2,):
        raise ConfigInvalid(
            f"{header.path.name}: {_FREQUENCIES} is {tensor.encoding} {tensor.shape}, expected F32 ({head_dim // 2},)"
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        divisors: tuple[float, ...] = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.size))
    if not all(math.isfinite(divisor) and divisor > 0 for divisor in divisors):
        raise FileCorrupt(f"{header.path.name}: {_FREQUENCIES} holds a divisor that is not a number above 0")
    return divisors
