"""What every layer is made from (Weights) and what it is given at every step (Inputs).

Weights allocates each tensor once and remembers which view of it is which canonical weight, so fusing (q, k, v in one
matrix), stacking (experts in one bank) and loading need not know of each other. Does not know files or formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from freetoken_kernels.reference.linear import Product
from torch import Tensor

from freetoken.engine.attention.base import Spans
from freetoken.engine.layers.rope import Rotation


class Weights:
    """Allocates the tensors of one model. `weights / "layers.0"` is the same store seen from a prefix."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype  # of matrices; vectors and routers are fp32
        self.product = Product()
        self._prefix = ""
        self._destinations: dict[str, Tensor] = {}

    def __truediv__(self, name: str) -> Weights:
        inner = object.__new__(Weights)
        inner.dtype, inner.product, inner._destinations = self.dtype, self.product, self._destinations
        inner._prefix = f"{self._prefix}{name}."
        return inner

    def vector(self, name: str, *shape: int) -> Tensor:
        """A new fp32 tensor that is the canonical weight `name`."""
        return self.assign(name, torch.empty(shape))

    def rows(self, parts: Mapping[str, int], width: int) -> Tensor:
        """A new (sum of rows, width) matrix in the weight dtype; part `name` is rows of it."""
        fused = torch.empty(sum(parts.values()), width, dtype=self.dtype)
        for name, part in zip(parts, fused.split(list(parts.values())), strict=True):
            self.assign(f"{name}.weight", part)
        return fused

    def biases(self, parts: Mapping[str, int]) -> Tensor:
        """A new fp32 vector; part `name`'s bias is a stretch of it."""
        fused = torch.empty(sum(parts.values()))
        for name, part in zip(parts, fused.split(list(parts.values())), strict=True):
            self.assign(f"{name}.bias", part)
        return fused

    def assign(self, name: str, view: Tensor) -> Tensor:
        """Declare that `view` holds the canonical weight `name`."""
        self._destinations[self._prefix + name] = view
        return view

    def destinations(self) -> dict[str, Tensor]:
        """Canonical name -> the view that the loader fills."""
        return self._destinations


@dataclass(frozen=True, slots=True)
class Inputs:
    """One forward pass over `tokens` tokens of several sequences, beside the activations themselves."""

    token_ids: Tensor  # (tokens) i64
    rotations: Mapping[str, Rotation]  # rope name -> cos and sin at these tokens' positions
    spans: Spans  # which cached keys each sequence's tokens see
    rows: Tensor  # (rows) i64: the tokens whose logits are wanted
