"""What one step holds only while it runs: activations and scratch, as named parts of the prefill transient. Pure.

Sublayers run one after another and give back what they took, so the widest of them counts, not their sum. Widths are
numbers a token; on a CPU they are the tensors alive at the worst moment of the engine's own code, elsewhere those of a
plain arrangement of the same mathematics. Staging of experts is not here: it is chosen (division.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from freetoken.catalog.spec import (
    Attention,
    Dense,
    GatedStreams,
    GluSpec,
    IndexSpec,
    Latent,
    LayerSpec,
    ModelSpec,
    Plain,
    Pooled,
    Recurrent,
    Residual,
    Routed,
    SinkhornStreams,
)
from freetoken.plan.footprint import Part
from freetoken.plan.kept import PAGE, kept_by
from freetoken.plan.storage import FP32, Storage, Weights

CHUNK = 64  # tokens that the gated delta rule computes together (arXiv 2412.06464, section 3.3)
WIDENING = 4 << 20  # bytes of a bf16 matrix that a CPU widens at a time
FLAT_ROWS = 64  # products of so few rows are computed transposed on a CPU, and copied
QUERY_BLOCK = 128  # queries that attend together
SINK_COPIES = 5  # of scores, where learned sinks make attention be written out: scores, masked, with sinks, softmax

Widths = dict[str, int]  # name of a part -> bytes a token
Layers = Counter[LayerSpec]  # how many of each kind


def prefill_parts(spec: ModelSpec, weights: Weights, storage: Storage) -> tuple[Part, ...]:
    """The transient of a step; a sublayer without a known width adds nothing (unknown_parts names it)."""
    layers = Counter(spec.layers)
    sublayers = [widths for layer in layers for widths in _sublayers(spec, layer, storage)]
    widest = max(sublayers, key=_total, default={})
    streams = _STREAMS.get(type(spec.residual), _plain)(spec.residual, spec.hidden)
    per_token = {"residual streams": streams * storage.number} | widest | {"positions": _positions(spec)}
    parts = [Part(name, per_token=size) for name, size in per_token.items()]
    if storage.device == "cpu":
        parts += _cpu_scratch(layers, storage, _total(widest))
    else:
        parts += _cuda_scratch(layers, storage)
    # products of many rows want a plain matrix: one dense weight at a time is decoded to bf16
    parts.append(Part("decoded weight", fixed=2 * weights.largest(storage)))
    return tuple(part for part in parts if part != Part(part.name))


def _total(widths: Widths) -> int:
    return sum(widths.values())


def unknown_parts(spec: ModelSpec) -> tuple[str, ...]:
    """Residuals and mixers whose activations are not known, by name."""
    mixers = {type(layer.mixer): None for layer in spec.layers}
    return tuple(
        [f"the mixer {kind.__name__}" for kind in mixers if kind not in _MIXERS]
        + ([] if type(spec.residual) in _STREAMS else [f"the residual {type(spec.residual).__name__}"])
    )


# ── activations, in numbers a token ─────────────────────────────────────────────────────────────────────────────────
def _sublayers(spec: ModelSpec, layer: LayerSpec, storage: Storage) -> list[Widths]:
    width = _MIXERS.get(type(layer.mixer))
    mixer = width(layer.mixer, spec.hidden, storage) if width else {}
    outputs = spec.hidden * storage.number * (len(layer.ffn) - 1)  # of the branches before
    ffn = []
    for branch in layer.ffn:
        widths = _body(branch.body, spec.hidden, storage)
        own = (branch.norm_in is not None) + (branch.norm_out is not None) + branch.gated
        widths["branches"] = outputs + own * spec.hidden * storage.number
        ffn.append(widths)
    return [mixer, *ffn]


def _attention(mixer: Attention, hidden: int, storage: Storage) -> Widths:
    queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    projected = queries * (1 + mixer.out_gate) + keys * (1 if mixer.v_is_k else 2)
    normed = (queries + keys) * ((mixer.qk_norm is not None) + (mixer.clip is not None))
    rotating = normed + 3 * queries  # x cos, x turned by half a head, their sum
    output = 2 * queries + keys * (1 + (mixer.v_norm is not None)) + hidden  # q, k, v, o, and o projected
    gated = 2 * queries if mixer.out_gate else 0
    return {
        "attention projections": projected * storage.number,
        "attention heads": max(rotating, output + gated) * storage.number,
        **_chosen(mixer.index),
    }


def _latent(mixer: Latent, hidden: int, storage: Storage) -> Widths:
    queries = mixer.heads * (mixer.nope_dim + mixer.rope_dim)
    low = (mixer.q_rank or 0) + mixer.kv_rank + mixer.rope_dim
    expanded = mixer.heads * (mixer.nope_dim + mixer.v_dim)  # keys and values of the chunk, out of their low rank
    return {
        "attention projections": (low + queries + expanded) * storage.number,
        "attention heads": (queries + mixer.heads * mixer.v_dim + hidden) * storage.number,
        **_chosen(mixer.index),
    }


def _pooled(mixer: Pooled, hidden: int, storage: Storage) -> Widths:
    queries, dims = mixer.heads * mixer.head_dim, mixer.head_dim + (mixer.index.dim if mixer.index else 0)
    pooled = 2 * dims * (2 if mixer.index else 1) if mixer.ratio else 0  # rows and gates
    low = mixer.q_rank + mixer.head_dim + mixer.o_groups * mixer.o_rank
    return {
        "attention projections": (low + queries) * storage.number + pooled * FP32,
        "attention heads": (2 * queries + hidden) * storage.number,  # q turned, o
        **_chosen(mixer.index),
    }


def _recurrent(mixer: Recurrent, hidden: int, storage: Storage) -> Widths:
    """The chunked form, arXiv 2412.06464 section 3.3: each chunk of C tokens is solved in matrices of C x C."""
    heads = mixer.value_heads
    keys, values = 2 * mixer.key_heads * mixer.key_dim, heads * mixer.value_dim
    return {
        "delta rule projections": (2 * (keys + values) + values) * storage.number,  # qkv, qkv after the conv, z
        "delta rule decays": heads * CHUNK * FP32,  # per head and chunk, C x C fp32: the strictly lower triangle
        "delta rule inverse": heads * CHUNK * FP32,  # (I + triangle) inverted
        "delta rule states": -(-heads * mixer.key_dim * mixer.value_dim // CHUNK) * storage.number,  # S at each start
        "delta rule u and w": heads * (mixer.value_dim + mixer.key_dim) * storage.number,
        "delta rule outputs": (2 * values + hidden) * storage.number,  # new values, o, and o projected
    }


def _chosen(index: IndexSpec | None) -> Widths:
    """Queries of the scorer in fp32, and the positions or blocks that it keeps."""
    return {"index": (index.heads * index.dim + index.keep) * FP32} if index else {}


def _body(body: Dense | Routed, hidden: int, storage: Storage) -> Widths:
    wide = (2 + _glu_width(body.glu)) * body.width  # gate, up, product
    if isinstance(body, Dense):
        return {"feed-forward": (wide + hidden) * storage.number}
    picked = body.router.top_k
    # while it routes: logits, scores and two copies of them; after that, order and weight of what was picked
    routing = max(4 * body.router.experts * FP32, picked * (2 * 8 + 4 * FP32))
    if storage.device == "cuda":
        return {
            "routed inputs": picked * hidden * storage.number,  # gathered by expert
            "routed gate and up": picked * 2 * body.width * storage.number,
            "routed product": picked * (wide - 2 * body.width) * storage.number,
            "routed outputs": (picked + 1) * hidden * storage.number,  # before and after the sum over what was picked
            "routing": routing,
        }
    if picked == body.router.experts:  # all at once, nothing is gathered
        return {"experts, all": (picked * wide + hidden) * storage.number, "routing": routing}
    # one expert at a time; every token may have picked it
    return {
        "experts, one": (wide + 3 * hidden) * storage.number,  # x gathered, its output, the sum
        "routing": max(routing, picked * (4 * 8 + 4 * FP32)),
    }


def _glu_width(glu: GluSpec) -> int:
    """Copies of the width beside gate and up."""
    clamped, shifted, scaled = 2 * (glu.limit is not None), bool(glu.up_shift), glu.alpha != 1.0
    return 1 + clamped + shifted + scaled


# ── residual streams, in numbers a token: the streams, one sublayer's input ─────────────────────────────────────────
def _plain(residual: Plain, hidden: int) -> int:
    return 2 * hidden


def _gated(residual: GatedStreams, hidden: int) -> int:
    return (3 * residual.count + 2) * hidden  # the streams, normed, their gates; input, output


def _sinkhorn(residual: SinkhornStreams, hidden: int) -> int:
    return (4 * residual.count + 2) * hidden  # the streams before and after, normed in fp32; input, output


_MIXERS: Mapping[type, Callable[..., Widths]] = {
    Attention: _attention,
    Latent: _latent,
    Recurrent: _recurrent,
    Pooled: _pooled,
}
_STREAMS: Mapping[type[Residual], Callable[..., int]] = {
    Plain: _plain,
    GatedStreams: _gated,
    SinkhornStreams: _sinkhorn,
}


# ── scratch ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _positions(spec: ModelSpec) -> int:
    """Cos and sin of every rope in fp32; ids, positions, pages and slots in i64."""
    return sum(2 * rope.dim for rope in spec.ropes.values()) * FP32 + 6 * 8


@dataclass(frozen=True, slots=True)
class _Mask:
    """Masks of one kind of attention layer, made once a step and kept to its end."""

    window: int | None
    group: int


def _cpu_scratch(layers: Layers, storage: Storage, widest: int) -> list[Part]:
    mixers = [layer.mixer for layer in layers if isinstance(layer.mixer, Attention)]
    masks = {_Mask(mixer.window, mixer.heads // mixer.kv_heads) for mixer in mixers}
    full = sum(mask.group for mask in masks if mask.window is None)
    near = sum(mask.group * (mask.window + QUERY_BLOCK) for mask in masks if mask.window is not None)
    # one layer's pages, copied together where they are not neighbours
    caches = (kept_by(layer.mixer, storage) for layer in layers)
    gathered = max((kept.page for kept in caches if kept), default=0) // PAGE
    sinks = max((mixer.heads for mixer in mixers if mixer.sinks), default=0)
    scores = QUERY_BLOCK * (FP32 + 4 + SINK_COPIES * sinks * FP32)  # a mask while it is made; scores if written out
    block = QUERY_BLOCK * 2 * max((mixer.heads * mixer.head_dim for mixer in mixers), default=0)  # its q and o
    return [
        Part("attention masks", per_token=near * FP32, per_token_context=full * FP32),
        Part("attention gather", fixed=PAGE * gathered + block * FP32, per_context=gathered + scores),
        Part("products of few rows", fixed=FLAT_ROWS * widest),
        Part("widened weights", fixed=WIDENING if storage.matrices.bytes_per_block < FP32 else 0),
    ]


def _cuda_scratch(layers: Layers, storage: Storage) -> list[Part]:
    # rows of the windows that a chunk adds, beyond those that a request keeps (memory.py): held, not given back
    caches = [(count, kept_by(layer.mixer, storage)) for layer, count in layers.items()]
    rows = sum(count * kept.row for count, kept in caches if kept)
    indexed = any(getattr(layer.mixer, "index", None) for layer in layers)
    return [
        Part("window rows", per_token=rows),
        Part("index scores", per_context=QUERY_BLOCK * FP32 if indexed else 0),  # of one block of queries, fp32
    ]
