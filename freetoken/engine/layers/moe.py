"""Routed feed-forward: a router chooses experts for every token, the experts seam computes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from freetoken_kernels.reference.routing import SCORES, choose
from torch import Tensor

from freetoken.catalog.spec import Routed, Router
from freetoken.engine.experts.banks import ExpertBank
from freetoken.engine.experts.dispatch import Dispatch
from freetoken.engine.layers.mlp import activation
from freetoken.engine.layers.module import Weights
from freetoken.engine.layers.norm import optional_norm


class TopKRouter:
    """source (tokens, hidden) f32 -> (pick (tokens, top_k) i64, weight (tokens, top_k) f32). All in fp32: a router in
    bf16 flips near-ties."""

    def __init__(self, spec: Router, hidden: int, vocab: int, weights: Weights) -> None:
        self._spec = spec
        self._score = SCORES[spec.score]
        self._everyone = torch.arange(spec.experts)
        self._norm = optional_norm(spec.norm, hidden, weights / "norm")
        self._weight = weights.vector("weight", spec.experts, hidden)
        self._bias = weights.vector("bias", spec.experts) if spec.bias else None
        self._choice_bias = weights.vector("choice_bias", spec.experts) if spec.choice_bias else None
        self._expert_scale = weights.vector("expert_scale", spec.experts) if spec.expert_scale else None
        self._table = weights.assign("table", torch.empty(vocab, spec.top_k, dtype=torch.long)) if spec.table else None

    def __call__(self, source: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        spec = self._spec
        logits = F.linear(source if self._norm is None else self._norm(source), self._weight, self._bias)
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        scores = self._score(logits)  # (tokens, experts) f32
        pick = self._choose(logits, scores, token_ids)
        weight = scores if spec.top_k == spec.experts else scores.gather(1, pick)
        if spec.renorm:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        if spec.scale != 1.0:
            weight = weight * spec.scale
        return pick, weight if self._expert_scale is None else weight * self._expert_scale[pick]

    def _choose(self, logits: Tensor, scores: Tensor, token_ids: Tensor) -> Tensor:
        if self._spec.top_k == self._spec.experts:
            return self._everyone.expand(len(logits), -1)
        if self._table is not None:
            return self._table[token_ids]
        # softmax scores underflow to ties where the logits that they keep the order of still differ
        values = logits if self._spec.score == "softmax" and self._choice_bias is None else scores
        if self._choice_bias is not None:
            values = values + self._choice_bias
        return choose(values, self._spec.top_k, self._spec.groups, self._spec.groups_kept)


class RoutedFfn:
    """x (tokens, hidden) f32, routed on `source` -> (tokens, hidden) f32. Counts the tokens that each expert got."""

    def __init__(self, spec: Routed, hidden: int, vocab: int, weights: Weights) -> None:
        experts = spec.router.experts
        self._router = TopKRouter(spec.router, hidden, vocab, weights / "router")
        bank = ExpertBank.allocate(
            experts,
            hidden,
            spec.width,
            bias=spec.bias,
            dtype=weights.dtype,
            together=spec.router.top_k == experts,
        )
        for name, view in bank.views():
            weights.assign(name, view)
        self._dispatch = Dispatch(bank, activation(spec.glu), weights.product)
        self.tokens = torch.zeros(experts, dtype=torch.long)  # (experts) i64: routed here since the load

    def __call__(self, x: Tensor, source: Tensor, token_ids: Tensor) -> Tensor:
        pick, weight = self._router(source, token_ids)
        self.tokens += torch.bincount(pick.flatten(), minlength=len(self.tokens))
        return self._dispatch(x, pick, weight)
