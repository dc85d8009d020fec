"""From what was asked (Requested) to what will be done (Resolved). Data; the arithmetic is in placement.py. Pure.

Requested may leave anything open (None = auto); Resolved cannot. Does not know tensors, files or processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Value = int | float | str
Backend = Literal["resident", "offload", "cpu"]
"""Where the routed experts are computed: all in VRAM; a part in VRAM and the misses fetched; the misses on the CPU."""


@dataclass(frozen=True, slots=True)
class Requested:
    """What the user fixed; None means: choose. Sizes are requirements in every backend: kept exactly or refused."""

    max_running_requests: int | None = None
    max_seq_len: int | None = None  # tokens: a shorter window than the model's
    max_prefill_tokens: int | None = None  # longest prefill chunk
    num_tokens: int | None = None  # KV pool, tokens
    num_pages: int | None = None  # KV pool, pages; with num_tokens the larger counts
    kv_reserve_tokens: int | None = None  # KV pool, tokens: at least this much
    moe_backend: Literal["auto", "resident", "offload", "cpu"] | None = None  # auto: as None
    moe_cache_size: int | None = None  # expert slots in VRAM, over all layers
    moe_cache_rate: float | None = None  # the same as a part of all experts; with moe_cache_size the larger counts
    memory_ratio: float | None = None
    vram_limit: int | None = None  # bytes
    gpu: str | None = None  # UUID
    dtype: Literal["float32", "bfloat16"] | None = None  # how unquantised weights are kept
    max_queued: int | None = None
    queue_deadline_s: float | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the engine is built from. Every field is decided."""

    device: Literal["cpu", "cuda"]
    weight_dtype: Literal["float32", "bfloat16"]  # storage; arithmetic is fp32 except one-row products of bf16 weights
    page_size: int  # tokens
    num_pages: int  # usable pages; the pool holds one dummy page more
    max_running_requests: int
    max_prefill_tokens: int
    max_seq_len: int  # effective context: min(window, pool, asked)
    max_queued: int
    queue_deadline_s: float
    threads: int
    gpu: str = ""  # UUID; empty on a CPU
    moe_backend: Backend = "resident"
    expert_slots: int = 0  # experts in VRAM; 0 on a CPU, where memory holds them all
    staging_buffers: int = 0  # layers of experts that prefill streams through: 2 overlaps copy and compute
    window_pages: int = 0  # pages of the sliding-window pool; 0: the model has none, or keeps full pages
    state_slots: int = 0  # recurrent states, one for each running request
    snapshot_slots: int = 0  # recurrent states that the prefix cache may keep


@dataclass(frozen=True, slots=True)
class Choice:
    """One field of Resolved, whence it comes and why."""

    value: Value
    source: Literal["requested", "default", "computed"]
    reason: str
