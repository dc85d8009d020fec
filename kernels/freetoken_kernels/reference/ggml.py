"""Decoding of ggml's block formats to fp32, in plain torch. Facts: ggml's block layouts (32 numbers a block).

Q8_0: f16 scale d, 32 x i8 q -> d * q. Q4_0: f16 d, 16 bytes -> d * (q - 8). Q4_1: f16 d, f16 m, 16 bytes -> d * q + m.
The 16 bytes hold number i in the low and number i + 16 in the high half of byte i.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32


def q8_0(data: Tensor) -> Tensor:
    """data (blocks * 34) u8 -> (blocks, 32) f32."""
    blocks = data.view(-1, 34)
    return blocks[:, 2:].view(torch.int8) * _f16(blocks[:, :2])


def q4_0(data: Tensor) -> Tensor:
    """data (blocks * 18) u8 -> (blocks, 32) f32."""
    blocks = data.view(-1, 18)
    return (_nibbles(blocks[:, 2:]) - 8.0) * _f16(blocks[:, :2])


def q4_1(data: Tensor) -> Tensor:
    """data (blocks * 20) u8 -> (blocks, 32) f32."""
    blocks = data.view(-1, 20)
    return _nibbles(blocks[:, 4:]) * _f16(blocks[:, :2]) + _f16(blocks[:, 2:4])


def _f16(pair: Tensor) -> Tensor:
    return pair.contiguous().view(torch.float16).float()  # (blocks, 1)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), dim=-1).float()  # (blocks, 32)
