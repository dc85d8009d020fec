"""Attention through torch's fused scaled_dot_product_attention, on keys read in place where pages allow it.

Heads that share keys become query rows of one head, so keys are read once a group and never copied out for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from freetoken_kernels.reference.attention import attention
from torch import Tensor

from freetoken.engine.attention.base import Span
from freetoken.engine.kv.base import KvCache


def sdpa(q: Tensor, cache: KvCache, spans: list[Span], *, scale: float, sinks: Tensor | None = None) -> Tensor:
    """See attention.base.Attend."""
    o = torch.empty_like(q)
    for span in spans:
        k, v = cache.read(span.keys)  # (kv_heads, keys, head_dim) f32
        for block in span.blocks:
            seen = (q[block.rows], k[:, block.keys], v[:, block.keys])
            if sinks is None:
                _fused(*seen, block.mask, scale, o[block.rows])
            else:
                o[block.rows] = _with_sinks(*seen, block.mask, scale, sinks)
    return o


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, o: Tensor) -> None:
    """Fills o (queries, heads, head_dim) f32."""
    kv_heads, (queries, heads, dim) = k.shape[0], q.shape
    group = heads // kv_heads
    rows = q.view(queries, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, queries * group, dim)
    found = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask, scale=scale)
    o.view(queries, kv_heads, group, dim).copy_(found.view(kv_heads, queries, group, dim).transpose(0, 1))


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    if mask is None:
        return attention(q, k, v, torch.ones(1, k.shape[1], dtype=torch.bool), scale, sinks)
    return attention(q, k, v, mask[:: mask.shape[0] // q.shape[0]] == 0, scale, sinks)
