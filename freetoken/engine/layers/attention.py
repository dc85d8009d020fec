"""Softmax attention as a layer: projections, norms, rope, cache, output. Every field of spec.Attention but two.

Does not know pages or sequences; `index` and `kv_from` are refused in models.build.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.catalog.spec import Attention
from freetoken.engine.attention.base import Attend
from freetoken.engine.kv.base import KvCache
from freetoken.engine.layers.linear import Linear
from freetoken.engine.layers.module import Inputs, Weights
from freetoken.engine.layers.norm import Norm, optional_norm


class AttentionLayer:
    """x (tokens, hidden) f32 -> (tokens, hidden) f32; appends the tokens' keys and values to `cache`."""

    def __init__(self, spec: Attention, hidden: int, weights: Weights, attend: Attend) -> None:
        self._spec, self._attend = spec, attend
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self._parts = {"q": queries, "k": keys}
        if not spec.v_is_k:
            self._parts["v"] = keys
        if spec.out_gate:
            self._parts["gate"] = queries
        self._qkv = Linear(self._parts, hidden, weights, bias=spec.qkv_bias)
        self._o = Linear({"o": hidden}, queries, weights, bias=spec.o_bias)
        self._per_head = spec.qk_norm_scope == "head"
        self._q_norm = optional_norm(spec.qk_norm, spec.head_dim if self._per_head else queries, weights / "q_norm")
        self._k_norm = optional_norm(spec.qk_norm, spec.head_dim if self._per_head else keys, weights / "k_norm")
        self._v_norm = optional_norm(spec.v_norm, spec.head_dim, weights / "v_norm")
        self._sinks = weights.vector("sinks", spec.heads) if spec.sinks else None  # (heads) f32

    def __call__(self, x: Tensor, inputs: Inputs, cache: KvCache) -> Tensor:
        spec = self._spec
        parts = dict(zip(self._parts, self._qkv(x).split(list(self._parts.values()), dim=-1), strict=True))
        q = self._heads(parts["q"], spec.heads, self._q_norm)
        k = self._heads(parts["k"], spec.kv_heads, self._k_norm)
        v = self._heads(parts["k" if spec.v_is_k else "v"], spec.kv_heads, None)
        if spec.rope is not None:
            rotation = inputs.rotations[spec.rope]
            q, k = rotation(q), rotation(k)
        cache.write(inputs.spans.slots, k, v if self._v_norm is None else self._v_norm(v))
        spans = inputs.spans.of(spec.window, spec.heads // spec.kv_heads)
        o = self._attend(q, cache, spans, scale=spec.scale, sinks=self._sinks).flatten(1)
        return self._o(o * parts["gate"].sigmoid() if spec.out_gate else o)

    def _heads(self, y: Tensor, heads: int, norm: Norm | None) -> Tensor:
        """y (tokens, heads * head_dim) f32 -> (tokens, heads, head_dim) f32, normed over all of it or per head."""
        if norm is not None and not self._per_head:
            y = norm(y)
        if self._spec.clip is not None:
            y = y.clamp(-self._spec.clip, self._spec.clip)
        y = y.unflatten(-1, (heads, self._spec.head_dim))
        return norm(y) if norm is not None and self._per_head else y
