"""Tiny random checkpoints of every family, as transformers and the gguf package write them: the oracles of the tests.

Default initialisation hides faults (norms of 1, biases of 0, logits almost flat), so every parameter is drawn: norms
1 + 0.3 N, eps 0.02, router twice as wide as usual, matrices 1.3 / sqrt(fan in). The same family and seed give the same
numbers everywhere. transformers and gguf are imported when a checkpoint is made, not before.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

VOCAB = 160
BOS, EOS, PAD, IM_START = 1, 2, 0, 3
SEED = 7

BASE: dict[str, Any] = {
    "rms_norm_eps": 0.02,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.1 * i for i in range(8)],
    "original_max_position_embeddings": 512,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama3": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "llama_yarn": ("llama", {"rope_parameters": _YARN}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama_longrope": ("llama", {"rope_parameters": LONGROPE}),
    "mistral": ("mistral", {"head_dim": 24, "sliding_window": 7}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3_moe_renorm": (
        "qwen3_moe",
        {**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2, "attention_bias": True},
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 9},
    ),
}
"""name -> (model_type, configuration beside BASE)."""

GGUF_FAMILIES = ("llama", "llama_tied", "llama3", "llama_linear", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
"""The names that tiny_gguf takes; windows and dense layers among routed ones, which GGUF cannot say, are left out."""


def tiny(
    family: str,
    folder: Path,
    *,
    tokenizer: bool = False,
    sharded: bool = False,
    dtype: str = "float32",
    **config_overrides: Any,
) -> Path:
    """Write a Hugging Face folder of a tiny model of `family` (a key of FAMILIES) and return it.

    tokenizer: also a byte-level tokenizer with a chat template and a generation_config.json (write_tokenizer).
    sharded: several files with an index. dtype: of the weights in the file.
    """
    import torch

    if tokenizer:
        config_overrides = {"vocab_size": len(vocabulary()[0])} | config_overrides
    model = build(family, **config_overrides).to(getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "5GB")
    if tokenizer:
        write_tokenizer(folder)
    return folder


def build(family: str, **config_overrides: Any) -> Any:
    """The transformers model itself, fp32, eager attention, in evaluation mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _quiet()
    model_type, extra = FAMILIES[family]
    values = json.loads(json.dumps({**BASE, **extra, **config_overrides}))  # transformers writes into what it is given
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    _randomise(model)
    return model


def oracle(folder: Path, **kwargs: Any) -> Any:
    """transformers' own model of a folder (or, with gguf_file=name, of a GGUF in it), fp32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    _quiet()
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **kwargs
    ).eval()


def _quiet() -> None:
    """No progress bars among the output of tests."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _randomise(model: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter.shape[-1]
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() < 2:
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(0.7 * noise)
            elif name.endswith(".gate.weight"):  # the router
                parameter.copy_(2.0 * noise / math.sqrt(fan_in))
            else:
                parameter.copy_(1.3 * noise / math.sqrt(fan_in))


# ── tokenizer ───────────────────────────────────────────────────────────────────────────────────────────────────────
SPECIAL = ("<|pad|>", "<|bos|>", "<|im_end|>", "<|im_start|>")  # ids 0 to 3
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MERGES = (
    "t h",
    "th e",
    "Ġ the",
    "a n",
    "i n",
    "o n",
    "e r",
    "o u",
    "Ġ a",
    "Ġ t",
    "in g",
    "an d",
    "Ġ and",
    "h e",
    "he l",
)
GENERATION = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}


def vocabulary() -> tuple[list[str], list[tuple[str, str]]]:
    """(tokens by id, merges) of a byte-level BPE: the special tokens, 256 bytes, and a few merges."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(left + right for left, right in merges)], merges


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json with a ChatML template, generation_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = vocabulary()
    bpe = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS], "pad_token_id": PAD, **GENERATION}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))


# ── GGUF ────────────────────────────────────────────────────────────────────────────────────────────────────────────
_ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}  # the rest are `llama`
SAYABLE: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "mixtral": {"sliding_window": None},
    "mistral": {"sliding_window": None},
}
"""What tiny_gguf overrides in a family, so that GGUF can say the rest."""


def tiny_gguf(
    family: str,
    path: Path,
    *,
    quant: str = "F32",
    tokenizer: bool = False,
    packed: bool = True,
    **config_overrides: Any,
) -> Path:
    """Write a tiny model of `family` (of GGUF_FAMILIES) as a GGUF file, as llama.cpp's converter would, and return it.

    The weights are build(family, ...)'s. quant: the type of matrices (F32 F16 BF16 Q8_0 Q4_0 Q4_1); norms, biases and
    routers stay F32. packed: experts as one tensor for each layer, else one for each expert, as old files have them.
    """
    import gguf

    overrides = {**SAYABLE.get(family, {}), **({"vocab_size": len(vocabulary()[0])} if tokenizer else {})}
    model = build(family, **{**overrides, **config_overrides})
    architecture = _ARCHITECTURES.get(model.config.model_type, "llama")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    write_facts(writer, model.config)
    if tokenizer:
        _write_vocabulary(writer)
    for name, array in _gguf_tensors(model, architecture, packed).items():
        plain = array.ndim < 2 or "ffn_gate_inp" in name
        kind = gguf.GGMLQuantizationType["F32" if plain else quant]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_facts(writer: Any, config: Any) -> None:
    import gguf

    rope = config.rope_parameters
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _write_vocabulary(writer: Any) -> None:
    import gguf

    tokens, merges = vocabulary()
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_tensors(model: Any, architecture: str, packed: bool) -> dict[str, Any]:
    """GGUF name -> fp32 array; the gguf package's own table gives the names."""
    import gguf
    import numpy

    config = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, tensor in _saved_names(model).items():
        array = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            array = _neighbours(array, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            array = _neighbours(array, config.num_key_value_heads)
        stem, expert = _without_expert(name)
        target = table.get_name(stem, try_suffixes=(".weight", ".bias"))
        assert target is not None, stem
        if expert is None:
            tensors[target] = array
        elif packed:
            tensors.setdefault(target, []).append(array)
        else:
            tensors[target.replace("_exps.", f".{expert}.")] = array
    if config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = numpy.array(_llama3_divisors(config), dtype=numpy.float32)
    return {name: numpy.stack(array) if isinstance(array, list) else array for name, array in tensors.items()}


def _saved_names(model: Any) -> dict[str, Any]:
    """The state dict under the names that save_pretrained gives it."""
    import tempfile

    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def _without_expert(name: str) -> tuple[str, int | None]:
    """`...experts.3.w1.weight` -> (`...experts.w1.weight`, 3)."""
    parts = name.split(".")
    if "experts" not in parts:
        return name, None
    at = parts.index("experts") + 1
    return ".".join(parts[:at] + parts[at + 1 :]), int(parts[at])


def _neighbours(array: Any, heads: int) -> Any:
    """Rows of each head from halves (i, i + dim / 2) to neighbours (2i, 2i + 1)."""
    rest = array.shape[1:]
    return array.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(array.shape)


def _llama3_divisors(config: Any) -> list[float]:
    """1 for short wavelengths, the factor for long ones, in between by the smooth formula of Llama 3.1."""
    rope, dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for i in range(dim // 2):
        rotations = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-2 * i / dim) / (2 * math.pi)
        smooth = min(1.0, max(0.0, (rotations - low) / (high - low)))
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
