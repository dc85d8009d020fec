"""Softmax attention of one sequence, written out: the definition of correct, and the path for attention sinks.

Scaled dot products: arXiv 1706.03762; grouped key-value heads: arXiv 2305.13245; learned sinks: the gpt-oss model card.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible(first_query: int, queries: int, first_key: int, keys: int, window: int | None) -> Tensor:
    """(queries, keys) bool: the query at position p sees the key at j when p - window < j <= p."""
    p = torch.arange(first_query, first_query + queries)[:, None]
    j = torch.arange(first_key, first_key + keys)[None]
    return j <= p if window is None else (j <= p) & (j > p - window)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """q (queries, heads, dim), k and v (kv_heads, keys, dim), mask (queries, keys) bool -> (queries, heads, dim), f32.

    sinks (heads) f32: one logit more per head that takes part in the softmax and is dropped after it; not scaled.
    """
    queries, heads, dim = q.shape
    grouped = q.view(queries, k.shape[0], -1, dim).permute(1, 2, 0, 3)  # (kv_heads, group, queries, dim)
    scores = grouped @ k[:, None].transpose(-1, -2) * scale  # (kv_heads, group, queries, keys)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.view(k.shape[0], -1, 1, 1).expand(-1, -1, queries, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v[:, None]).permute(2, 0, 1, 3).reshape(queries, heads, v.shape[-1])
