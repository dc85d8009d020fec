"""How a tensor's numbers are stored: block sizes, bytes, and where in which file. Pure.

Names and sizes follow the two file formats: safetensors' dtypes (its format description) and ggml's block types
(ggml-common.h: a Q4_0 block is an f16 scale and 32 nibbles, 18 bytes). Does not know how to decode them (engine/quant).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from freetoken.core.errors import UnsupportedEncoding
from freetoken.core.registry import Registry


@dataclass(frozen=True, slots=True)
class Encoding:
    """`block` consecutive numbers of a row take `bytes_per_block` bytes."""

    name: str
    block: int
    bytes_per_block: int

    def size(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of that (row-major) shape. Raises ValueError where its rows are not whole blocks."""
        row = shape[-1] if shape else 1
        if row % self.block:
            raise ValueError(f"rows of {row} numbers are not whole {self.name} blocks of {self.block}")
        return prod(shape) // self.block * self.bytes_per_block


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. The bytes are `file[offset : offset + size]`."""

    name: str  # as the file spells it
    encoding: str
    shape: tuple[int, ...]  # row-major: the last dimension is contiguous, as torch has it
    file: Path
    offset: int  # from the start of the file
    size: int  # bytes


_PLAIN = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 40),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "F4": (2, 1),
}

STORED: Registry[Encoding] = Registry(
    "stored type",
    {name: Encoding(name, 1, size) for name, size in _PLAIN.items()}
    | {name: Encoding(name, block, size) for name, (block, size) in _BLOCKS.items()},
)
"""Everything a header may name: enough to check sizes, whether or not it can be decoded."""

ENCODINGS: Registry[Encoding] = Registry(
    "encoding", {name: STORED[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")}
)
"""What weights can be loaded from."""


def require_decodable(tensor: TensorInfo) -> None:
    """Raise UnsupportedEncoding, naming the tensor and what is supported, unless its encoding is in ENCODINGS."""
    if tensor.encoding not in ENCODINGS:
        raise UnsupportedEncoding(
            f"tensor {tensor.name} of {tensor.file.name} is stored as {tensor.encoding}; "
            f"supported are {', '.join(ENCODINGS)}",
            fixes=(f"use a checkpoint stored as one of {', '.join(ENCODINGS)}",),
        )
