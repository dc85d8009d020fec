"""The one loading loop: for every canonical tensor, its parts' bytes -> numbers -> steps -> its destination.

Families differ in names (catalog.names, replayed here as steps), formats in decoders (quant), destinations in sinks;
none of the three knows the others. Memory beyond the destinations is one piece of at most 32 MiB of file, except where
a step needs a whole stored tensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from freetoken.catalog.encodings import ENCODINGS
from freetoken.catalog.names import (
    AddOne,
    Item,
    MappedTensor,
    Part,
    Rows,
    Squeeze,
    Step,
    Stride,
    Transpose,
    Unpermute,
)
from freetoken.core.errors import LoadCancelled, TensorMismatch
from freetoken.engine.load.readers import MappedFiles
from freetoken.engine.load.sinks import ResidentSink
from freetoken.engine.quant.table import DECODERS

PIECE = 32 << 20  # bytes of file between two reports, two looks at `cancelled`
REPORT_S = 0.1

Report = Callable[[int, int], None]  # (bytes done, bytes in all)


def verify(tensors: Mapping[str, MappedTensor], destinations: Mapping[str, Tensor]) -> None:
    """Raise TensorMismatch, naming up to five, unless both have the same names and shapes."""
    found = {name: tensor.shape for name, tensor in tensors.items()}
    built = {name: tuple(view.shape) for name, view in destinations.items()}
    wrong = sorted(name for name in found.keys() | built.keys() if found.get(name) != built.get(name))
    if wrong:
        lines = (f"{name}: file {found.get(name)}, model {built.get(name)}" for name in wrong[:5])
        raise TensorMismatch(
            f"{len(wrong)} tensors differ between the files and the model: {'; '.join(lines)}",
            numbers={"tensors": len(wrong)},
        )


def load(tensors: Mapping[str, MappedTensor], sink: ResidentSink, report: Report, cancelled: Callable[[], bool]) -> int:
    """Fill the sink; returns the bytes read. Raises LoadCancelled, FileCorrupt, WeightsMissing."""
    sources = [_Source(name, part) for name, tensor in _in_file_order(tensors) for part in tensor.parts]
    progress = _Progress(sum(source.size for source in sources), report)
    first_rows: dict[str, int] = {}
    with MappedFiles() as files:
        for source in sources:
            row = first_rows.get(source.name, 0)
            for values, size in source.pieces(files):
                if cancelled():
                    raise LoadCancelled("the load was cancelled while weights were read")
                sink.write(source.name, row, values)
                row += values.shape[0]
                progress.add(size)
            first_rows[source.name] = row
    progress.finish()
    return progress.total


def read(tensor: MappedTensor, files: MappedFiles) -> Tensor:
    """One canonical tensor's numbers, whole, in the dtype that its format decodes to."""
    return torch.cat([values for part in tensor.parts for values, _ in _Source(tensor.name, part).pieces(files)])


def _in_file_order(tensors: Mapping[str, MappedTensor]) -> list[tuple[str, MappedTensor]]:
    """Reading in order lets the disk read ahead."""
    return sorted(tensors.items(), key=lambda item: (item[1].parts[0].tensor.file, item[1].parts[0].tensor.offset))


@dataclass(slots=True)
class _Progress:
    """Bytes so far, reported at least every 32 MiB and not more often than every 100 ms otherwise."""

    total: int
    report: Report
    done: int = 0
    reported: int = 0
    reported_s: float = 0.0

    def add(self, size: int) -> None:
        self.done += size
        if self.done - self.reported >= PIECE or time.monotonic() - self.reported_s >= REPORT_S:
            self._say()

    def finish(self) -> None:
        if self.reported < self.done or not self.done:
            self._say()

    def _say(self) -> None:
        self.report(self.done, self.total)
        self.reported, self.reported_s = self.done, time.monotonic()


class _Source:
    """One part of a canonical tensor: a stretch of a stored tensor's bytes, and the steps that are left to do."""

    def __init__(self, name: str, part: Part) -> None:
        self.name = name
        self._tensor = part.tensor
        self._decode = DECODERS[part.tensor.encoding]
        self._start, self._shape, self._steps = _narrow(part)
        self.size = ENCODINGS[part.tensor.encoding].size(self._shape)

    def pieces(self, files: MappedFiles) -> Iterator[tuple[Tensor, int]]:
        """(values (rows, ...), bytes of file they took), in order of rows."""
        if self._steps or len(self._shape) < 2:
            values = self._decode(files.read(self._tensor, self._start, self.size), self._shape)
            for step in self._steps:
                values = _apply(step, values)
            yield values, self.size
            return
        row_bytes = self.size // self._shape[0]
        rows = max(1, PIECE // row_bytes)
        for first in range(0, self._shape[0], rows):
            count = min(rows, self._shape[0] - first)
            data = files.read(self._tensor, self._start + first * row_bytes, count * row_bytes)
            yield self._decode(data, (count, *self._shape[1:])), count * row_bytes


def _narrow(part: Part) -> tuple[int, tuple[int, ...], tuple[Step, ...]]:
    """(first byte, shape, steps left): leading steps that take consecutive rows need no decoding of the others.

    An expert of a packed tensor is such a stretch; without this every expert would decode all of them.
    """
    start, shape, steps = 0, part.tensor.shape, part.steps
    while steps and len(shape) > 1:
        step, row_bytes = steps[0], ENCODINGS[part.tensor.encoding].size(shape) // shape[0]
        if isinstance(step, Item) and len(shape) > 2:
            start += step.index * row_bytes
        elif isinstance(step, Rows) and step.groups == 1:
            start += step.start * row_bytes
        else:
            break
        shape, steps = step.shape(shape), steps[1:]
    return start, shape, steps


def _apply(step: Step, x: Tensor) -> Tensor:
    """The step on numbers; catalog.names says what each means."""
    match step:
        case Rows(groups, start, stop):
            return x.unflatten(0, (groups, -1))[:, start:stop].flatten(0, 1)
        case Item(index):
            return x[index]
        case Stride(offset, every):
            return x[offset::every]
        case Transpose():
            return x.transpose(-1, -2)
        case AddOne():
            return x.float() + 1
        case Squeeze(dim):
            return x.squeeze(dim)
        case Unpermute(heads):
            return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
