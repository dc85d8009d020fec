"""Matrix products with resident weights: one matrix, or several that read the same input fused into one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from freetoken.engine.layers.module import Weights


class Linear:
    """x (tokens, width) f32 -> (tokens, sum of rows) f32, the parts side by side in the order given."""

    def __init__(self, parts: Mapping[str, int], width: int, weights: Weights, *, bias: bool = False) -> None:
        self._product = weights.product
        self._weight = weights.rows(parts, width)  # (rows, width) f32 or bf16
        self._bias = weights.biases(parts) if bias else None  # (rows) f32

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, self._weight, self._bias)
