"""The smallest loader there can be, for tests: safetensors and F32 GGUF tensors, their steps replayed one by one."""

from __future__ import annotations

import torch

from freetoken.catalog import names
from freetoken.catalog.checkpoint import Checkpoint, TensorInfo

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_all(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Every canonical tensor, in full."""
    return {
        name: torch.cat([_steps(read(part.tensor), part.steps) for part in tensor.parts])
        for name, tensor in checkpoint.tensors.items()
    }


def read(tensor: TensorInfo) -> torch.Tensor:
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        raw = bytearray(file.read(tensor.size))
    return torch.frombuffer(raw, dtype=_DTYPES[tensor.encoding]).reshape(tensor.shape)


def _steps(x: torch.Tensor, steps: tuple[names.Step, ...]) -> torch.Tensor:
    for step in steps:
        before = tuple(x.shape)
        x = apply(step, x)
        assert tuple(x.shape) == step.shape(before)
    return x


def apply(step: names.Step, x: torch.Tensor) -> torch.Tensor:
    match step:
        case names.Rows(groups, start, stop):
            return x.unflatten(0, (groups, -1))[:, start:stop].flatten(0, 1)
        case names.Item(index):
            return x[index]
        case names.Stride(offset, each):
            return x[offset::each]
        case names.Transpose():
            return x.transpose(-1, -2)
        case names.AddOne():
            return x.float() + 1
        case names.Squeeze(dim):
            return x.squeeze(dim)
        case names.Unpermute(heads):
            return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
