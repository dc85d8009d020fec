"""A model's Footprint from what its headers say: every ledger line on one kind of device. Pure integer arithmetic.

Puts together weights (storage.py), caches and states (kept.py) and the transient (prefill.py), and adds what the engine
and its libraries take. Does not know budgets or choices (placement.py).
"""

from __future__ import annotations

from collections import Counter
from math import prod

from freetoken.catalog.checkpoint import Checkpoint
from freetoken.catalog.spec import ModelSpec, NGram, Routed
from freetoken.core.units import Bytes
from freetoken.plan.footprint import Experts, Footprint, Term, Work
from freetoken.plan.kept import PAGE, Kept, kept_by
from freetoken.plan.prefill import prefill_parts, unknown_parts
from freetoken.plan.storage import (
    DTYPES,
    FP32,
    GRAIN,
    Device,
    Storage,
    Weights,
    expert_bytes,
    storage,
    weights_of,
)

RUNTIME = 320 << 20  # interpreter and torch on a CPU, before any tensor: what a process of ours holds resident
HOST_RUNTIME = 1 << 30  # the same beside a GPU, with the driver's own memory; an assumption
CUDA_CONTEXT = 768 << 20
"""What the driver and the loaded kernels take of a card beside tensors. On an H200 with torch 2.11 for CUDA 13: 619 MiB
at the first tensor, 695 with cuBLAS and the usual kernels, 765 with a second stream. Cards with fewer processors take
less; assumed until a load has measured it."""
ATTENTION_WORKSPACE = 256 << 20  # what paged attention kernels ask for once and for all (FT #303)
GRAPH_LAYER = 128 << 10  # of each captured batch size and layer of 16 kernels; 640 kernels took 4 MiB there
POOLS = 3 * (2 << 20)  # torch takes device memory 2 MiB at a time, for small blocks, large blocks and graphs apart
BLAS = 2 * (32 << 20)  # cuBLAS' workspaces in torch's pools: of the stream at work and of the one that captures
SNAPSHOTS = 2
"""Copies of a recurrent state for each running request, which cannot be cropped: one from the start of the chunk, which
a failed step is run again from, and one from the end of the prompt, which the conversation's next turn goes on from."""
ALLOCATOR = f"multiples of {GRAIN} B and of 2 MiB, cuBLAS' workspaces"
CHUNKS: dict[Device, tuple[int, ...]] = {"cpu": (512, 256, 128, 64), "cuda": (8192, 4096, 2048, 1024, 512, 256)}
"""Prefill chunks to choose from. On a CPU a chunk of 512 tokens takes a second or more, and a cancel waits for it."""
SHARP = 256  # likeliest tokens whose logits a CPU computes again in fp32
SAMPLED = 48  # bytes of each logit of the row being sampled: f64 scaled, cut, sorted, normalised, summed


def footprints(checkpoint: Checkpoint, device: Device) -> dict[str, Footprint]:
    """Weight dtype -> sizes, the default first: bf16 where most of the checkpoint is, else fp32."""
    weights = weights_of(checkpoint.spec)
    dtypes = sorted(DTYPES, key=lambda dtype: (dtype == "bfloat16") != _is_bfloat16(checkpoint, device))
    return {
        dtype: footprint(checkpoint.spec, storage(device, dtype), weights=weights, notes=checkpoint.notes)
        for dtype in dtypes
    }


def _is_bfloat16(checkpoint: Checkpoint, device: Device) -> bool:
    # a card has neither the room nor the speed for fp32, whatever the checkpoint is
    return device == "cuda" or checkpoint.dtype == "BF16"


def footprint(
    spec: ModelSpec, kept: Storage, *, weights: Weights | None = None, notes: tuple[str, ...] = ()
) -> Footprint:
    """The sizes of one model as `kept` on one device."""
    weights = weights or weights_of(spec)
    caches = [kept_by(layer.mixer, kept) or Kept() for layer in spec.layers]
    terms, resolved = _state_terms(caches)
    terms += _cpu_terms(spec, kept, weights) if kept.device == "cpu" else _cuda_terms(spec, kept, weights)
    return Footprint(
        terms=tuple(term for term in terms if term.fixed or term.per_request),
        page_size=PAGE,
        page_bytes=sum(cache.page for cache in caches),
        window=spec.max_positions,
        work=_work(spec, kept, weights),
        prefill=prefill_parts(spec, weights, kept),
        experts=_experts(spec, kept) if kept.device == "cuda" else None,
        chunks=CHUNKS[kept.device],
        host=_host_terms(kept),
        unknown=_unknown(spec),
        notes=notes,
        resolved=resolved,
    )


# ── the lines ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _cpu_terms(spec: ModelSpec, kept: Storage, weights: Weights) -> list[Term]:
    count, held = sum(body.router.experts for _, body in spec.routed()), all_experts_bytes(spec, kept, weights)
    logits = 2 * spec.embed.vocab * FP32 + SHARP * spec.hidden * (FP32 + 2)
    experts = f"{Bytes(held)} of it {count:,} routed experts"
    return [
        Term("weights", weights.bytes(kept), detail=f"matrices as {kept.matrices.name}"),
        Term("weights", held, detail=experts),
        Term("logits", SAMPLED * spec.embed.vocab, logits, detail="fp32 logits of each request, one row in f64"),
        Term("allocator", RUNTIME, basis="assumed", detail="interpreter and libraries of the engine process"),
    ]


def _cuda_terms(spec: ModelSpec, kept: Storage, weights: Weights) -> list[Term]:
    lanes = 2 * 2 * spec.hidden * kept.number  # a token's input and output, of the layer at work and of the next
    graph = GRAPH_LAYER * len(spec.layers)
    staged = Term("cpu_staging", 0, lanes if spec.routed() else 0, detail="tokens on their way to experts on the CPU")
    return [
        Term("weights", weights.bytes(kept), detail=f"without routed experts; matrices as {kept.matrices.name}"),
        Term("attention_workspace", ATTENTION_WORKSPACE, basis="assumed", detail="of paged attention kernels"),
        Term("logits", 0, 2 * spec.embed.vocab * FP32, detail="fp32 logits of each request and their working copy"),
        Term("graphs", 0, graph, basis="assumed", detail="one captured decode step for each batch size"),
        Term("allocator", weights.rounding(kept) + POOLS + BLAS, basis="assumed", detail=ALLOCATOR),
        Term("cuda_context", CUDA_CONTEXT, basis="assumed", detail="driver, kernels and libraries"),
        staged,
    ]


def _host_terms(kept: Storage) -> tuple[Term, ...]:
    detail = "interpreter, libraries and driver of the engine process"
    return (Term("allocator", HOST_RUNTIME, basis="assumed", detail=detail),) if kept.device == "cuda" else ()


def _state_terms(caches: list[Kept]) -> tuple[list[Term], tuple[tuple[str, int], ...]]:
    """Windows and states of each running request, and the fields of Resolved that say how many there are."""
    terms, resolved = [], []
    row, state = sum(cache.row for cache in caches), sum(cache.state for cache in caches)
    if row:
        # the rows that the next token sees, wherever in a page they begin, and the page that it is in; the rows that a
        # chunk adds to the pool are in the transient, for they depend on its length
        pages = -(-max(cache.window - 1 for cache in caches) // PAGE) + 2
        terms.append(Term("state", 0, pages * PAGE * row, detail=f"{pages:,} pages of sliding window a request"))
        resolved.append(("window_pages", pages))
    if state:
        terms.append(Term("state", 0, state, detail=f"{Bytes(state)} of recurrent state a request"))
        terms.append(Term("snapshots", 0, SNAPSHOTS * state, detail=f"{SNAPSHOTS} copies of it a request"))
        resolved += [("state_slots", 1), ("snapshot_slots", SNAPSHOTS)]
    return terms, tuple(resolved)


# ── experts and work ────────────────────────────────────────────────────────────────────────────────────────────────
def all_experts_bytes(spec: ModelSpec, kept: Storage, weights: Weights) -> int:
    """Every routed expert of every layer, without padding."""
    return sum(count * body.router.experts * expert_bytes(spec, body, kept) for count, body in weights.routed)


def _experts(spec: ModelSpec, kept: Storage) -> Experts | None:
    """Slots are one pool over all layers, so each is as large as the largest expert."""
    bodies = Counter(body for _, body in spec.routed())
    if not bodies:
        return None
    slot = max(expert_bytes(spec, body, kept, GRAIN) for body in bodies)
    return Experts(
        layers=bodies.total(),
        per_layer=max(body.router.experts for body in bodies),
        top_k=max(body.router.top_k for body in bodies),
        slot_bytes=slot,
        bank_bytes=slot,  # one layout: what a slot holds is copied as it lies in memory
    )


def _work(spec: ModelSpec, kept: Storage, weights: Weights) -> Work:
    """What one decoded token reads and multiplies with: of an embedding one row, of the routed experts top_k."""
    looked_up = {"token_table.weight"} | (set() if spec.head.tied else {"embed.weight"})
    used = [(n, name, shape) for n, name, shape in weights.tensors() if name not in looked_up]
    dense_bytes = sum(count * kept.bytes(name, shape) for count, name, shape in used)
    routed = [(count * body.router.top_k, body) for count, body in weights.routed]
    routed_bytes = sum(picked * expert_bytes(spec, body, kept) for picked, body in routed)
    expert_params = sum(picked * _params(spec, body) for picked, body in routed)
    return Work(
        read_bytes=dense_bytes + (routed_bytes if kept.device == "cpu" else 0),
        params=sum(count * prod(shape) for count, _, shape in used) + expert_params,
        layers=len(spec.layers),
        expert_params=expert_params,
    )


def _params(spec: ModelSpec, body: Routed) -> int:
    return 3 * spec.hidden * body.width


def _unknown(spec: ModelSpec) -> tuple[str, ...]:
    injected = (
        ("the table of the injection NGram",) if any(isinstance(one.inject, NGram) for one in spec.layers) else ()
    )
    window = () if spec.max_positions else ("the trained window",)
    return (*unknown_parts(spec), *injected, *window)
