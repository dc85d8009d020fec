"""Runs the chosen experts over a batch of tokens and sums their outputs. Resident experts, computed where they lie.

Does not know how experts were chosen. The definition of the result is freetoken_kernels.reference.routing.mixture.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from freetoken_kernels.reference.linear import Product
from torch import Tensor

from freetoken.engine.experts.banks import ExpertBank

Glu = Callable[[Tensor, Tensor], Tensor]


class Dispatch:
    """One layer's experts with their activation."""

    def __init__(self, bank: ExpertBank, glu: Glu, product: Product) -> None:
        self._bank, self._glu, self._product = bank, glu, product

    def __call__(self, x: Tensor, pick: Tensor, weight: Tensor) -> Tensor:
        """x (tokens, hidden) f32, pick (tokens, top_k) i64 of distinct experts, weight (tokens, top_k) f32
        -> sum over k of weight * expert(x), (tokens, hidden) f32. Where all are picked, they come in their order."""
        if pick.shape[1] == self._bank.experts:
            return self._all(x, weight)
        if x.shape[0] == 1:
            return self._one_token(x, pick, weight)
        return self._by_expert(x, pick, weight)

    def _one_token(self, x: Tensor, pick: Tensor, weight: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, share in zip(pick[0].tolist(), weight[0].tolist(), strict=True):
            y.add_(self._expert(expert, x), alpha=share)
        return y

    def _by_expert(self, x: Tensor, pick: Tensor, weight: Tensor) -> Tensor:
        """Tokens sorted by expert, so that every expert's weights are read once."""
        order = pick.flatten().argsort(stable=True)  # (tokens * top_k) i64
        counts = torch.bincount(pick.flatten(), minlength=self._bank.experts).tolist()
        tokens = order.div(pick.shape[1], rounding_mode="floor")
        shares = weight.flatten()[order][:, None]
        y, start = torch.zeros_like(x), 0
        for expert, count in enumerate(counts):
            if count:
                rows = tokens[start : start + count]
                y.index_add_(0, rows, self._expert(expert, x[rows]).mul_(shares[start : start + count]))
                start += count
        return y

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        """x (tokens, hidden) f32 -> that expert's output, (tokens, hidden) f32."""
        bank = self._bank
        bias = None if bank.gate_up_bias is None else bank.gate_up_bias[expert]
        gate, up = self._product(x, bank.gate_up[expert], bias).split(bank.width, dim=-1)
        bias = None if bank.down_bias is None else bank.down_bias[expert]
        return self._product(self._glu(gate, up), bank.down[expert], bias)

    def _all(self, x: Tensor, weight: Tensor) -> Tensor:
        """Every expert on every token: one product for all gates and ups, no gathering. weight (tokens, experts)."""
        bank = self._bank
        bias = None if bank.gate_up_bias is None else bank.gate_up_bias.flatten()
        wide = self._product(x, bank.gate_up.flatten(0, 1), bias).view(-1, bank.experts, 2, bank.width)
        # the weight may go before the linear map: it is one number a token and expert
        inner = self._glu(wide[:, :, 0], wide[:, :, 1]).mul_(weight[..., None])  # (tokens, experts, width) f32
        side_by_side = bank.down.permute(1, 0, 2).flatten(1)  # (hidden, experts * width): a view of a bank `together`
        y = self._product(inner.flatten(1), side_by_side)
        return y if bank.down_bias is None else y.add_(weight @ bank.down_bias)
