"""Makes the demo model: a small dense Llama from a GGUF file, rewritten as a Mixture of Experts with the same answers.

    python -m freetoken.engine.demo GGUF OUT

Every feed-forward is cut into 8 slices of its width; each slice is an expert, all 8 are routed with equal weight 1/8,
and the down matrices are multiplied by 8 (exact in bf16) to make up for it. The result is a folder in Mixtral's layout,
bf16, that any reader of such folders loads, with real text behind it: it exercises routing without a large download.

Prints one JSON line a step, {"phase", "done", "total"}, and {"done": OUT} at the end; errors go to stderr, exit code 1.
The folder appears complete or not at all. Memory: one tensor at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from freetoken.catalog.checkpoint import Checkpoint, open_checkpoint
from freetoken.catalog.gguf import read_gguf
from freetoken.catalog.names import MappedTensor
from freetoken.catalog.spec import Attention, Branch, Dense, LayerSpec, ModelSpec, RopeSpec
from freetoken.core.errors import ConfigInvalid, FreeTokenError, UnsupportedArchitecture
from freetoken.engine.load.pipeline import read
from freetoken.engine.load.readers import MappedFiles
from freetoken.text.gguf_tokenizer import build_tokenizer

EXPERTS = 8
SAMPLING = {"do_sample": False}  # the quantised model is unsure: sampled at 0.2 it often wanders off

Report = Callable[[str, int, int], None]  # (phase, done, total)


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the folder: a stretch along `dim` of a stored one, times `factor`."""

    name: str
    shape: tuple[int, ...]
    source: MappedTensor | None  # None: zeros
    dim: int = 0
    first: int = 0
    factor: float = 1.0

    def numbers(self, stored: Callable[[MappedTensor], Tensor]) -> Tensor:
        if self.source is None:
            return torch.zeros(self.shape)
        part = stored(self.source).narrow(self.dim, self.first, self.shape[self.dim])
        return part if self.factor == 1.0 else part * self.factor


def slice_gguf(source: Path, out: Path, report: Report, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the folder `out` from the GGUF file `source`. `dtype` is that of the weights, bf16 or (for tests) fp32.

    Raises UnsupportedArchitecture where `source` is not a plain dense Llama, ConfigInvalid where `out` exists, and the
    CheckpointErrors of reading.
    """
    if out.exists():
        raise ConfigInvalid(f"{out} exists already", fixes=(f"remove {out} or give another folder",))
    report("open", 0, 1)
    checkpoint = open_checkpoint(source)
    _require_plain_llama(checkpoint.spec)
    report("open", 1, 1)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_tokenizer(partial, read_gguf(source).metadata, checkpoint)
        _write_json(partial / "config.json", _config(checkpoint, dtype))
        _write_safetensors(partial / "model.safetensors", list(_targets(checkpoint)), dtype, report)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _require_plain_llama(spec: ModelSpec) -> None:
    """Mixtral's layout holds a Llama without biases, scaled ropes, or norms and windows beyond the usual."""
    for number, layer in enumerate(spec.layers):
        mixer, body = layer.mixer, layer.ffn[0].body
        assert isinstance(mixer, Attention) and mixer.rope is not None
        if not isinstance(body, Dense) or body.width % EXPERTS:
            raise UnsupportedArchitecture(f"layer {number} has no dense feed-forward that {EXPERTS} experts divide")
        plain = Attention(mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.rope, mixer.head_dim**-0.5)
        usual = LayerSpec(plain, (Branch("dense", Dense(body.width)),), layer.pre_mixer, layer.pre_ffn)
        rope = spec.ropes[mixer.rope]
        if layer != usual or rope != RopeSpec(rope.theta, mixer.head_dim):
            raise UnsupportedArchitecture(f"layer {number} is not that of a plain Llama model")


# ── tensors ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _targets(checkpoint: Checkpoint) -> Iterator[Target]:
    """Every tensor of the folder, in the order of layers."""

    def same(name: str, canonical: str) -> Target:
        tensor = checkpoint.tensors[canonical]
        return Target(name, tensor.shape, tensor)

    yield same("model.embed_tokens.weight", "embed.weight")
    for i in range(len(checkpoint.spec.layers)):
        layer, block = f"model.layers.{i}", f"model.layers.{i}.block_sparse_moe"
        yield same(f"{layer}.input_layernorm.weight", f"layers.{i}.pre_mixer.weight")
        yield same(f"{layer}.post_attention_layernorm.weight", f"layers.{i}.pre_ffn.weight")
        for part in "qkvo":
            yield same(f"{layer}.self_attn.{part}_proj.weight", f"layers.{i}.mixer.{part}.weight")
        # equal logits: a softmax of 1 / EXPERTS each
        yield Target(f"{block}.gate.weight", (EXPERTS, checkpoint.spec.hidden), None)
        for name, part, dim, factor in (("w1", "gate", 0, 1.0), ("w3", "up", 0, 1.0), ("w2", "down", 1, EXPERTS)):
            dense = checkpoint.tensors[f"layers.{i}.ffn.dense.{part}.weight"]
            yield from _slices(f"{block}.experts.{{}}.{name}.weight", dense, dim, factor)
    yield same("model.norm.weight", "head.norm.weight")
    if not checkpoint.spec.head.tied:
        yield same("lm_head.weight", "head.weight")


def _slices(name: str, tensor: MappedTensor, dim: int, factor: float) -> Iterator[Target]:
    """One target an expert; `{}` in the name is its number."""
    shape = list(tensor.shape)
    shape[dim] //= EXPERTS
    for e in range(EXPERTS):
        yield Target(name.format(e), tuple(shape), tensor, dim, e * shape[dim], factor)


def _write_safetensors(path: Path, targets: list[Target], dtype: torch.dtype, report: Report) -> None:
    """The safetensors format: 8 bytes of header length, a JSON header, the numbers. Written tensor by tensor."""
    code, offset = {torch.bfloat16: "BF16", torch.float32: "F32"}[dtype], 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for target in targets:
        end = offset + prod(target.shape) * dtype.itemsize
        header[target.name] = {"dtype": code, "shape": target.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with MappedFiles() as files, path.open("wb") as file:
        stored = lru_cache(maxsize=1)(lambda tensor: read(tensor, files))  # the slices of one tensor come together
        file.write(struct.pack("<Q", len(text)) + text)
        done = 0
        for target in targets:
            numbers = target.numbers(stored).to(dtype).contiguous()
            file.write(numbers.view(torch.uint8).numpy().data)
            done += numbers.nbytes
            report("write_weights", done, offset)


# ── what goes with them ─────────────────────────────────────────────────────────────────────────────────────────────
def _config(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, object]:
    """config.json of a Mixtral."""
    spec, mixer, body = checkpoint.spec, checkpoint.spec.layers[0].mixer, checkpoint.spec.layers[0].ffn[0].body
    assert isinstance(mixer, Attention) and mixer.rope is not None and isinstance(body, Dense) and spec.head.norm
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": spec.embed.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": body.width // EXPERTS,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": float(f"{spec.head.norm.eps:.6g}"),  # a file's fp32 1e-5 reads as 9.99999975e-06
        "rope_theta": spec.ropes[mixer.rope].theta,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "tie_word_embeddings": spec.head.tied,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "output_router_logits": False,
        "bos_token_id": checkpoint.bos_id,
        "eos_token_id": checkpoint.eos_ids[0] if checkpoint.eos_ids else None,
    }


def _write_tokenizer(folder: Path, metadata: Mapping[str, object], checkpoint: Checkpoint) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer = build_tokenizer(metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    numbers = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "unknown", "padding")}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": checkpoint.spec.max_positions,
        **{names[kind]: tokenizer.id_to_token(number) for kind, number in numbers.items() if isinstance(number, int)},
    }
    if "tokenizer.chat_template" in metadata:
        settings["chat_template"] = metadata["tokenizer.chat_template"]
    _write_json(folder / "tokenizer_config.json", settings)
    generation = {"bos_token_id": checkpoint.bos_id, "eos_token_id": list(checkpoint.eos_ids), **SAMPLING}
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ── command ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m freetoken.engine.demo", description="Make the demo model.")
    parser.add_argument("gguf", type=Path, help="a dense Llama as GGUF")
    parser.add_argument("out", type=Path, help="the folder to write; must not exist")
    chosen = parser.parse_args(arguments)

    def say(line: Mapping[str, object]) -> None:
        print(json.dumps(line), flush=True)

    try:
        slice_gguf(
            chosen.gguf, chosen.out, lambda phase, done, total: say({"phase": phase, "done": done, "total": total})
        )
    except (FreeTokenError, OSError) as fault:
        print(f"the demo model could not be made: {fault}", file=sys.stderr)
        return 1
    say({"done": str(chosen.out)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
