"""Dense feed-forward and the gated activation that experts share with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from freetoken_kernels.reference.pointwise import glu, glu_gelu_tanh
from torch import Tensor

from freetoken.catalog.spec import Dense, GluSpec
from freetoken.engine.layers.linear import Linear
from freetoken.engine.layers.module import Weights


def activation(spec: GluSpec) -> Callable[[Tensor, Tensor], Tensor]:
    """(gate, up) -> the gated product, as GluSpec says."""
    if spec.kind == "gelu_tanh":
        return partial(glu_gelu_tanh, limit=spec.limit)
    return partial(glu, alpha=spec.alpha, limit=spec.limit, up_shift=spec.up_shift)


class DenseFfn:
    """x (tokens, hidden) f32 -> down(glu(gate x, up x)), (tokens, hidden) f32."""

    def __init__(self, spec: Dense, hidden: int, weights: Weights) -> None:
        self._width = spec.width
        self._glu = activation(spec.glu)
        self._gate_up = Linear({"gate": spec.width, "up": spec.width}, hidden, weights, bias=spec.bias)
        self._down = Linear({"down": hidden}, spec.width, weights, bias=spec.bias)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).split(self._width, dim=-1)
        return self._down(self._glu(gate, up))
