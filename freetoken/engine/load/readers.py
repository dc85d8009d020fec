"""Bytes of tensors out of files, mapped, never copied as a whole. Does not know what the bytes mean."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from freetoken.catalog.encodings import TensorInfo
from freetoken.core.errors import FileCorrupt, WeightsMissing


class MappedFiles:
    """Weight files, each mapped when first read. A context manager: leaving it unmaps what nothing views any more."""

    def __init__(self) -> None:
        self._bytes: dict[Path, Tensor] = {}

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bytes.clear()

    def read(self, tensor: TensorInfo, start: int, size: int) -> Tensor:
        """(size) u8: bytes start .. start + size of `tensor`, a view of the file.

        Raises WeightsMissing where the file cannot be opened, FileCorrupt where it ends too early.
        """
        data = self._file(tensor.file)
        first = tensor.offset + start
        if first + size > len(data):
            raise FileCorrupt(
                f"{tensor.file.name} ends at byte {len(data)}, but {tensor.name} reaches to byte {first + size}",
                numbers={"found_bytes": len(data), "expected_bytes": first + size},
                fixes=("download the file again",),
            )
        return data[first : first + size]

    def _file(self, path: Path) -> Tensor:
        if path not in self._bytes:
            self._bytes[path] = _map(path)
        return self._bytes[path]


def _map(path: Path) -> Tensor:
    try:
        with path.open("rb") as file:
            # private and writable: torch takes no read-only buffer; nothing writes, so no page is ever copied
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as fault:
        raise WeightsMissing(f"{path.name} cannot be read: {fault.strerror or fault}") from fault
    except ValueError as fault:
        raise FileCorrupt(f"{path.name} is empty", fixes=("download the file again",)) from fault
    return torch.frombuffer(view, dtype=torch.uint8)
