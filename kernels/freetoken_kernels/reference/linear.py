"""x @ weight.T, twice: the definition, and the fastest arrangement of the same product that torch offers on a CPU.

Neither rounds anything but what is said here. `product` was chosen by measurement on x86 with AVX2 (MKL, oneDNN);
figures in the comments are ratios of time, so that another machine can judge them again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_WHOLE = 1 << 20  # numbers: up to so many are widened at once, 4 MiB of fp32 that stay in the cache until they are read
_TILE = 1 << 19  # numbers of a tile of a larger weight: half that size is 1.07x faster
_LOOP_ROWS = 3  # up to so many rows, reading a bf16 weight once a row beats widening it (1.7x at 2 rows, equal at 4)
_FLAT_ROWS = 64  # up to so many rows, weight @ x.T beats x @ weight.T (1.5-3x: MKL splits the long dimension)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The definition: x (tokens, in) f32, weight (out, in) f32 or bf16, bias (out) f32 -> (tokens, out) f32."""
    y = x @ weight.float().t()
    return y if bias is None else y + bias


class Product:
    """`linear` with a scratch for widened weights. One caller at a time; the scratch holds at most 4 MiB or one row.

    One to three rows of a bf16 weight go through torch's bf16 matrix-vector product: x and y are rounded to bf16, sums
    are fp32. It reads half the bytes, so it takes half the time of any fp32 product. With more rows the weight is
    widened tile by tile and all is fp32: without AVX-512, torch's bf16 matrix product runs at 1/7 of fp32's speed.
    """

    def __init__(self) -> None:
        self._scratch = torch.empty(0)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (tokens, in) f32, weight (out, in) f32 or bf16, bias (out) f32 -> (tokens, out) f32, contiguous."""
        if weight.dtype == torch.float32:
            y = _dense(x, weight)
        elif self.rounds(x, weight):
            y = _by_row(x, weight)
        else:
            y = self._widened(x, weight)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def rounds(x: Tensor, weight: Tensor) -> bool:
        """Whether this product's results are rounded to bf16."""
        return weight.dtype != torch.float32 and x.shape[0] <= _LOOP_ROWS

    def _widened(self, x: Tensor, weight: Tensor) -> Tensor:
        tokens, rows = x.shape[0], weight.shape[0]
        if weight.numel() <= _WHOLE:
            return _dense(x, self._widen(weight))
        step = -(-rows // -(-weight.numel() // _TILE))  # equal tiles
        if tokens <= _FLAT_ROWS:
            y = torch.empty(rows, tokens)  # (out, tokens) f32
            for start in range(0, rows, step):
                torch.mm(self._widen(weight[start : start + step]), x.t(), out=y[start : start + step])
            return y.t().contiguous()
        y = torch.empty(tokens, rows)
        for start in range(0, rows, step):
            tile = self._widen(weight[start : start + step])
            torch.mm(x, tile.t(), out=y[:, start : start + step])
        return y

    def _widen(self, weight: Tensor) -> Tensor:
        """`weight` as fp32 in a buffer that the next call reuses: fresh pages would fault."""
        if self._scratch.numel() < weight.numel():
            self._scratch = torch.empty(weight.numel())
        return self._scratch[: weight.numel()].view(weight.shape).copy_(weight)


def _dense(x: Tensor, weight: Tensor) -> Tensor:
    if 1 < x.shape[0] <= _FLAT_ROWS:
        return (weight @ x.t()).t().contiguous()
    return F.linear(x, weight)


def _by_row(x: Tensor, weight: Tensor) -> Tensor:
    # mm, not linear: one dispatch less a product counts when a token takes hundreds of them
    matrix, narrow = weight.t(), x.to(weight.dtype)
    if x.shape[0] == 1:
        return torch.mm(narrow, matrix).float()
    return torch.cat([torch.mm(row, matrix) for row in narrow.split(1)]).float()
