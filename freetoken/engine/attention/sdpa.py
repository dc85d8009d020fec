"""Attention through torch's fused scaled_dot_product_attention, on keys read in place where pages allow it.

Grouped heads are never copied out: a decode's group becomes its query rows, a prefill's is an expanded view.
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
    queries, _, dim = q.shape
    if mask is None:  # one query: its grouped heads are rows that see the same keys
        rows = q.view(1, k.shape[0], -1, dim)  # (1, kv_heads, group, head_dim)
        o.view(rows.shape).copy_(F.scaled_dot_product_attention(rows, k[None], v[None], scale=scale))
        return
    grouped = q.view(queries, k.shape[0], -1, dim).permute(1, 2, 0, 3)  # (kv_heads, group, queries, head_dim)
    shared = (k.shape[0], grouped.shape[1], -1, -1)
    found = F.scaled_dot_product_attention(
        grouped, k[:, None].expand(shared), v[:, None].expand(shared), attn_mask=mask, scale=scale
    )
    o.view(queries, k.shape[0], -1, dim).copy_(found.permute(2, 0, 1, 3))


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor) -> Tensor:
    seen = torch.ones(q.shape[0], k.shape[1], dtype=torch.bool) if mask is None else mask == 0
    return attention(q, k, v, seen, scale, sinks)
