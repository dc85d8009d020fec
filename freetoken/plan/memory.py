"""Bytes of every ledger line, from a ModelSpec alone. Pure integer arithmetic; torch-free.

Does not know budgets or choices (placement.py). State sizes follow the mixer's kind, never the family.
"""

from __future__ import annotations

from math import prod

from freetoken.catalog.expected import expected
from freetoken.catalog.spec import Attention, Dense, LayerSpec, Mixer, ModelSpec, Routed
from freetoken.core.units import Bytes

FP32 = 4
WIDENING = 4 << 20  # freetoken_kernels.reference.linear
ELEMENT = {"float32": 4, "bfloat16": 2}


def weight_bytes(spec: ModelSpec, dtype: str) -> Bytes:
    """Resident weights: matrices in `dtype`; routers and vectors (norms, biases, sinks) in fp32."""
    shapes = expected(spec).items()
    return Bytes(sum(prod(shape) * (FP32 if _stays_fp32(name, shape) else ELEMENT[dtype]) for name, shape in shapes))


def expert_bytes(spec: ModelSpec, dtype: str) -> Bytes:
    """The routed experts' part of weight_bytes, over all layers."""
    matrices = sum(body.router.experts * 3 * body.width * spec.hidden for _, body in spec.routed())
    return Bytes(matrices * ELEMENT[dtype])


def kv_token_bytes(spec: ModelSpec) -> Bytes:
    """Keys and values of one token over all layers, fp32. Sliding windows keep full pages: the window is a mask."""
    return Bytes(sum(_mixer_token_bytes(layer.mixer) for layer in spec.layers))


def prefill_bytes(spec: ModelSpec, tokens: int, context: int, dtype: str) -> Bytes:
    """The largest layer's activations for a chunk of `tokens` behind `context` cached tokens, plus the fp32
    scratch that bf16 matrices are widened into, tile by tile."""
    activations = max(_layer_row_bytes(spec.hidden, layer) for layer in spec.layers) * tokens
    gathered = max(_mixer_token_bytes(layer.mixer) for layer in spec.layers) * context
    return Bytes(activations + gathered + (WIDENING if dtype == "bfloat16" else 0))


def logits_bytes(spec: ModelSpec, rows: int) -> Bytes:
    """Last-token logits and the sampler's working copy, fp32."""
    return Bytes(2 * rows * spec.embed.vocab * FP32)


def _mixer_token_bytes(mixer: Mixer) -> int:
    if isinstance(mixer, Attention):
        return 0 if mixer.kv_from is not None else 2 * mixer.kv_heads * mixer.head_dim * FP32
    raise NotImplementedError(f"no state size for {type(mixer).__name__}")


def _layer_row_bytes(hidden: int, layer: LayerSpec) -> int:
    """Live activations of one token in the wider of the two sublayers: residual, normed input, projections, output."""
    mixer = layer.mixer
    attention = 0
    if isinstance(mixer, Attention):
        # q, k, v as projected and once more after rope; the attention output
        attention = (2 * (mixer.heads + 2 * mixer.kv_heads) + mixer.heads) * mixer.head_dim
    ffn = max(_body_row_width(branch.body) for branch in layer.ffn)
    return (4 * hidden + max(attention, ffn)) * FP32


def _body_row_width(body: Dense | Routed) -> int:
    if isinstance(body, Dense):
        return 3 * body.width  # gate, up, product
    return 3 * body.width + 3 * body.router.experts + 2 * body.router.top_k  # one expert at a time, and the routing


def _stays_fp32(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) < 2 or ".router." in name
