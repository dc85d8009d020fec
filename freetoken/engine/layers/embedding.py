"""Token ids to activations and activations to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.catalog.spec import EmbeddingSpec, HeadSpec
from freetoken.engine.layers.module import Weights
from freetoken.engine.layers.norm import optional_norm


class Embedding:
    """token ids (tokens) i64 -> (tokens, hidden) f32."""

    def __init__(self, spec: EmbeddingSpec, hidden: int, weights: Weights) -> None:
        self.weight = weights.rows({"embed": spec.vocab}, hidden)  # (vocab, hidden) f32 or bf16
        # authors multiply in the model's dtype: sqrt(3072) is 55.5 in bf16, not 55.43
        self._scale = float(torch.tensor(spec.scale, dtype=weights.dtype))

    def __call__(self, token_ids: Tensor) -> Tensor:
        x = self.weight[token_ids].float()
        return x if self._scale == 1.0 else x * self._scale


SHARP = 256  # likeliest tokens whose logits are always exact


class Head:
    """activations (rows, hidden) f32 -> logits (rows, vocab) f32."""

    def __init__(self, spec: HeadSpec, embedding: Embedding, weights: Weights) -> None:
        vocab, hidden = embedding.weight.shape
        self._spec, self._product = spec, weights.product
        self._norm = optional_norm(spec.norm, hidden, weights / "head.norm")
        self._weight = embedding.weight if spec.tied else weights.rows({"head": vocab}, hidden)

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self._norm is None else self._norm(x)
        logits = self._product(x, self._weight)
        if self._product.rounds(x, self._weight):
            self._sharpen(logits, x)
        if self._spec.divisor != 1.0:
            logits = logits / self._spec.divisor
        if self._spec.softcap is not None:
            logits = torch.tanh(logits / self._spec.softcap) * self._spec.softcap
        return logits

    def _sharpen(self, logits: Tensor, x: Tensor) -> None:
        """Compute the best logits again in fp32: rounded to 8 bits, the likeliest tokens would tie."""
        best = logits.topk(min(SHARP, logits.shape[1])).indices  # (rows, best) i64
        exact = self._weight[best].float() @ x[:, :, None]  # (rows, best, 1) f32
        logits.scatter_(1, best, exact[:, :, 0])
