"""Formats that hold numbers as they are: decoding is a view of the bytes, whatever their alignment allows."""

from __future__ import annotations

import torch
from torch import Tensor

from freetoken.engine.quant.base import Decoder


def plain(dtype: torch.dtype) -> Decoder:
    """A decoder for little-endian numbers of `dtype`."""

    def decode(data: Tensor, shape: tuple[int, ...]) -> Tensor:
        if data.data_ptr() % dtype.itemsize:
            data = data.clone()  # a file may place a tensor at any byte; a view needs it aligned
        return data.view(dtype).view(shape)

    return decode
