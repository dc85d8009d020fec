"""What a stored format must offer the loader: its bytes as numbers. Does not know files, names or destinations."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Decoder(Protocol):
    def __call__(self, data: Tensor, shape: tuple[int, ...]) -> Tensor:
        """data (bytes) u8, whole rows of `shape` -> a tensor of that shape; a view of `data` where no arithmetic is
        needed. Never writes to `data`."""
        ...
