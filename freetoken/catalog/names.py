"""Operations on weight names, as data: a family's NameMap turns the names in its files into canonical ones. Pure.

Canonical names are those of expected.py. An operation sees names and shapes only; what has to be done to the numbers is
kept as steps, which the engine's loader replays on the decoded tensors in order. Patterns are regular expressions,
searched (not anchored); in a `to`, \\1 and the like are the pattern's groups and replace the matched part only.
Does not know encodings, families or tensors.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from freetoken.catalog.encodings import TensorInfo
from freetoken.core.errors import TensorMismatch

Shape = tuple[int, ...]

_MOST_EXPERTS = 65536  # in one tensor; an empty tensor may claim any number


# ── steps: what happens to one stored tensor on its way ─────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Rows:
    """View dim 0 as (groups, rows / groups), take [start, stop) of every group, flatten back."""

    groups: int
    start: int
    stop: int

    def shape(self, shape: Shape) -> Shape:
        if not shape or shape[0] % self.groups or not 0 <= self.start <= self.stop <= shape[0] // self.groups:
            raise ValueError(f"{shape} has no rows {self.start}:{self.stop} in {self.groups} groups")
        return (self.groups * (self.stop - self.start), *shape[1:])


@dataclass(frozen=True, slots=True)
class Item:
    """x[index]."""

    index: int

    def shape(self, shape: Shape) -> Shape:
        if not shape or self.index >= shape[0]:
            raise ValueError(f"{shape} has no item {self.index}")
        return shape[1:]


@dataclass(frozen=True, slots=True)
class Stride:
    """x[offset::step]."""

    offset: int
    step: int

    def shape(self, shape: Shape) -> Shape:
        if not shape or shape[0] % self.step:
            raise ValueError(f"{shape} does not divide into {self.step} interleaved parts")
        return (shape[0] // self.step, *shape[1:])


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swap the last two dimensions."""

    def shape(self, shape: Shape) -> Shape:
        if len(shape) < 2:
            raise ValueError(f"{shape} has no two dimensions to swap")
        return (*shape[:-2], shape[-1], shape[-2])


@dataclass(frozen=True, slots=True)
class AddOne:
    """x in fp32, plus 1. In bf16 it would destroy a weight stored as w - 1."""

    def shape(self, shape: Shape) -> Shape:
        return shape


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Remove a dimension of size 1."""

    dim: int

    def shape(self, shape: Shape) -> Shape:
        if self.dim >= len(shape) or shape[self.dim] != 1:
            raise ValueError(f"dimension {self.dim} of {shape} is not 1")
        return (*shape[: self.dim], *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Unpermute:
    """Undo GGUF's order of q and k rows in architecture `llama`: there rope pairs are neighbours (2i, 2i + 1).

    View dim 0 as (heads, dim / 2, 2), swap the last two of these, flatten back.
    """

    heads: int

    def shape(self, shape: Shape) -> Shape:
        if not shape or shape[0] % (2 * self.heads):
            raise ValueError(f"{shape} does not divide into {self.heads} heads of pairs")
        return shape


Step = Rows | Item | Stride | Transpose | AddOne | Squeeze | Unpermute


# ── what a NameMap yields ───────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor and what to do to it."""

    tensor: TensorInfo
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A canonical tensor; several parts are concatenated on dim 0."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]

    def then(self, step: Step, name: str | None = None) -> MappedTensor:
        """This tensor after one step more. Raises TensorMismatch where the shape does not allow it."""
        if len(self.parts) > 1 and not isinstance(step, AddOne):
            raise TensorMismatch(f"{self.name} is already joined from {len(self.parts)} tensors: cannot {step}")
        try:
            shape = step.shape(self.shape)
        except ValueError as fault:
            raise TensorMismatch(
                f"tensor {self.parts[0].tensor.name} does not have the layout of its family: {fault}"
            ) from fault
        parts = tuple(Part(part.tensor, (*part.steps, step)) for part in self.parts)
        return MappedTensor(name or self.name, shape, parts)


Tensors = dict[str, MappedTensor]


# ── operations ──────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Op(ABC):
    """One line of a NameMap: rewrites every tensor whose name its pattern finds, leaves the others alone."""

    pattern: str

    def apply(self, tensors: Tensors) -> Tensors:
        hits = _hits(self.pattern, tensors)
        if not hits:
            return tensors
        result = _without(tensors, hits)
        for match, tensor in hits:
            for new in self.rewrite(match, tensor):
                _add(result, new)
        return result

    @abstractmethod
    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterable[MappedTensor]: ...


@dataclass(frozen=True, slots=True)
class Drop(Op):
    """Leave the tensor out."""

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterable[MappedTensor]:
        return ()


@dataclass(frozen=True, slots=True)
class Rename(Op):
    """Another name, the same numbers."""

    to: str

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterable[MappedTensor]:
        return (_renamed(tensor, match, self.to),)


@dataclass(frozen=True, slots=True)
class Cut(Op):
    """Split dim 0 into named parts of so many rows each; with groups, every group holds its share of each part."""

    parts: tuple[tuple[str, int], ...]  # (name, rows in all groups together)
    groups: int = 1

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterator[MappedTensor]:
        rows = sum(rows for _, rows in self.parts)
        if not tensor.shape or tensor.shape[0] != rows:
            found = tensor.parts[0].tensor
            raise TensorMismatch(f"tensor {found.name} has shape {found.shape}, expected {rows} rows")
        start = 0
        for to, rows in self.parts:
            stop = start + rows // self.groups
            yield tensor.then(Rows(self.groups, start, stop), _substitute(match, to))
            start = stop


@dataclass(frozen=True, slots=True)
class Unstack(Op):
    """(E, ...) -> E tensors; `{e}` in the name is the number."""

    to: str

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterator[MappedTensor]:
        name = _substitute(match, self.to)
        if not 0 < tensor.shape[0] <= _MOST_EXPERTS if tensor.shape else True:
            raise TensorMismatch(
                f"tensor {tensor.parts[0].tensor.name} has shape {tensor.shape}, expected experts first"
            )
        for e in range(tensor.shape[0]):
            yield tensor.then(Item(e), name.replace("{e}", str(e)))


@dataclass(frozen=True, slots=True)
class Deinterleave(Op):
    """Rows 0::n, 1::n, ... -> n tensors."""

    to: tuple[str, ...]

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterator[MappedTensor]:
        for offset, to in enumerate(self.to):
            yield tensor.then(Stride(offset, len(self.to)), _substitute(match, to))


@dataclass(frozen=True, slots=True)
class Transposed(Op):
    """Stored (..., in, out)."""

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterable[MappedTensor]:
        return (tensor.then(Transpose()),)


@dataclass(frozen=True, slots=True)
class PlusOne(Op):
    """Stored as weight - 1."""

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterable[MappedTensor]:
        return (tensor.then(AddOne()),)


@dataclass(frozen=True, slots=True)
class Squeezed(Op):
    """Stored with a dimension of size 1 that means nothing."""

    dim: int

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterable[MappedTensor]:
        return (tensor.then(Squeeze(self.dim)),)


@dataclass(frozen=True, slots=True)
class Permuted(Op):
    """Stored with rope's pairs side by side (see Unpermute)."""

    heads: int

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterable[MappedTensor]:
        return (tensor.then(Unpermute(self.heads)),)


@dataclass(frozen=True, slots=True)
class Join(Op):
    """Numbered shards (the pattern's first group) -> one tensor, concatenated on dim 0 in order of their numbers."""

    to: str

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterable[MappedTensor]:
        return (_renamed(tensor, match, self.to),)

    def apply(self, tensors: Tensors) -> Tensors:
        return _concatenate(tensors, self, lambda match: int(match[1]))


@dataclass(frozen=True, slots=True)
class Fuse(Op):
    """Siblings (the pattern's first group is one of `parts`) -> one tensor, concatenated on dim 0 in that order."""

    parts: tuple[str, ...]
    to: str

    def rewrite(self, match: re.Match[str], tensor: MappedTensor) -> Iterable[MappedTensor]:
        return (_renamed(tensor, match, self.to),)

    def apply(self, tensors: Tensors) -> Tensors:
        return _concatenate(tensors, self, lambda match: self.parts.index(match[1]))


NameMap = tuple[Op, ...]


def resolve(ops: NameMap, tensors: Mapping[str, TensorInfo]) -> dict[str, MappedTensor]:
    """What each canonical tensor is made of. Raises TensorMismatch where the files do not have the family's layout."""
    mapped = {name: MappedTensor(name, tensor.shape, (Part(tensor),)) for name, tensor in tensors.items()}
    for op in ops:
        mapped = op.apply(mapped)
    return mapped


# ── shared by the operations ────────────────────────────────────────────────────────────────────────────────────────
Hits = list[tuple[re.Match[str], MappedTensor]]


def _hits(pattern: str, tensors: Tensors) -> Hits:
    search = re.compile(pattern).search
    return [(match, tensor) for name, tensor in tensors.items() if (match := search(name))]


def _without(tensors: Tensors, hits: Hits) -> Tensors:
    """A copy that lacks the hits. Most operations touch few of many thousand tensors."""
    result = dict(tensors)
    for _, tensor in hits:
        del result[tensor.name]
    return result


def _substitute(match: re.Match[str], to: str) -> str:
    return match.re.sub(to, match.string, count=1)


def _renamed(tensor: MappedTensor, match: re.Match[str], to: str) -> MappedTensor:
    return MappedTensor(_substitute(match, to), tensor.shape, tensor.parts)


def _add(result: Tensors, tensor: MappedTensor) -> None:
    there = result.setdefault(tensor.name, tensor)
    if there is not tensor:
        one, other = there.parts[0].tensor.name, tensor.parts[0].tensor.name
        raise TensorMismatch(f"tensors {one} and {other} are both {tensor.name}")


def _concatenate(tensors: Tensors, op: Op, rank: Callable[[re.Match[str]], int]) -> Tensors:
    hits = _hits(op.pattern, tensors)
    result = _without(tensors, hits)
    shards: dict[str, dict[int, MappedTensor]] = {}
    for match, tensor in hits:
        for renamed in op.rewrite(match, tensor):
            if shards.setdefault(renamed.name, {}).setdefault(rank(match), renamed) is not renamed:
                raise TensorMismatch(f"part {rank(match)} of {renamed.name} is there twice")
    for name, found in shards.items():
        ordered = [found[number] for number in sorted(found)]
        if len({tensor.shape[1:] for tensor in ordered}) > 1 or not ordered[0].shape:
            raise TensorMismatch(f"the parts of {name} have shapes {[tensor.shape for tensor in ordered]}")
        _add(result, _joined(name, ordered))
    return result


def _joined(name: str, ordered: list[MappedTensor]) -> MappedTensor:
    shape = (sum(tensor.shape[0] for tensor in ordered), *ordered[0].shape[1:])
    return MappedTensor(name, shape, tuple(part for tensor in ordered for part in tensor.parts))
