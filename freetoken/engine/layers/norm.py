"""Norms as layers. Statistics and weights are fp32 whatever the matrices are kept in."""

from __future__ import annotations

import torch
from freetoken_kernels.reference.pointwise import layer_norm, rms_norm
from torch import Tensor

from freetoken.catalog.spec import NormSpec
from freetoken.engine.layers.module import Weights


class Norm:
    """x (..., size) f32 -> the same shape; NormSpec says how."""

    def __init__(self, spec: NormSpec, size: int, weights: Weights) -> None:
        self._spec = spec
        self._eps = torch.tensor(spec.eps)
        self._weight = weights.vector("weight", size) if spec.weight else None  # (size) f32
        self._bias = weights.vector("bias", size) if spec.kind == "layer" else None  # (size) f32

    def __call__(self, x: Tensor) -> Tensor:
        if self._spec.kind == "layer":
            return layer_norm(x, self._weight, self._bias, self._spec.eps)
        if self._spec.group is None:
            return rms_norm(x, self._weight, self._eps)
        y = rms_norm(x.unflatten(-1, (-1, self._spec.group)), None, self._eps).flatten(-2)
        return y if self._weight is None else y.mul_(self._weight)


def optional_norm(spec: NormSpec | None, size: int, weights: Weights) -> Norm | None:
    """The norm, or None where the place has none."""
    return None if spec is None else Norm(spec, size, weights)
