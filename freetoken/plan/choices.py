"""From what was asked (Requested) to what will be done (Resolved). Data; the arithmetic is in placement.py. Pure.

Requested may leave anything open (None = auto); Resolved cannot. Does not know tensors, files or processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Requested:
    """What the user fixed; None means: choose."""

    max_running_requests: int | None = None
    max_seq_len: int | None = None  # tokens: a shorter window than the model's
    max_prefill_tokens: int | None = None  # longest prefill chunk
    num_tokens: int | None = None  # KV pool, tokens
    num_pages: int | None = None  # KV pool, pages; with num_tokens the larger counts
    memory_ratio: float | None = None
    dtype: Literal["float32", "bfloat16"] | None = None  # how weights are kept
    max_queued: int | None = None
    queue_deadline_s: float | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the engine is built from. Every field is decided."""

    device: Literal["cpu"]
    weight_dtype: Literal["float32", "bfloat16"]  # storage; arithmetic is fp32 except one-row products of bf16 weights
    page_size: int  # tokens
    num_pages: int  # usable pages; the pool holds one dummy page more
    max_running_requests: int
    max_prefill_tokens: int
    max_seq_len: int  # effective context: min(window, pool, asked)
    max_queued: int
    queue_deadline_s: float
    threads: int
