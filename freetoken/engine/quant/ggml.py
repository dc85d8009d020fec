"""ggml's block formats as decoders: fp32 numbers in the tensor's shape. The arithmetic is in the kernels package."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from freetoken.engine.quant.base import Decoder


def blocks(dequantise: Callable[[Tensor], Tensor]) -> Decoder:
    """A decoder from a function (bytes) u8 -> (blocks, 32) f32."""

    def decode(data: Tensor, shape: tuple[int, ...]) -> Tensor:
        return dequantise(data).view(shape)

    return decode
