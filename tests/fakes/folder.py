"""A checkpoint folder written by hand, in milliseconds: a Llama of a few kilobytes of zeros, with a word tokenizer.

For tests of what surrounds a model (catalog, plan, text are the real ones); nothing here computes.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

HIDDEN, FFN, HEADS, VOCABULARY = 16, 32, 2, 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def tiny_folder(folder: Path, fake: dict[str, Any] | None = None) -> Path:
    """Makes `folder`; `fake` is the script of tests.fakes.worker."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    _safetensors(folder / "model.safetensors", _shapes())
    words = ["<unk>", "<s>", "</s>", "user", "assistant", "system", "hello", "world"]
    vocabulary = {word: id for id, word in enumerate(words + [f"w{n}" for n in range(VOCABULARY - len(words))])}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    parts: dict[str, Any] = {
        "normalizer": None,
        "post_processor": None,
        "decoder": None,
        "truncation": None,
        "padding": None,
    }
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **parts}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    if fake is not None:
        (folder / "fake.json").write_text(json.dumps(fake))
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }
    outer = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return {**outer, **{f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}}


def _safetensors(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """The format: 8 bytes of header length, the header as JSON, the data."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
