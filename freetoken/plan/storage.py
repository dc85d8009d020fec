"""How one device keeps a model's numbers, and what its weights take. Pure integer arithmetic.

Sizes follow shapes and encodings, never families. Does not know caches (kept.py) or activations (prefill.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from freetoken.catalog.encodings import STORED, Encoding
from freetoken.catalog.expected import Shapes, expert_shapes, frame_shapes, layer_shapes
from freetoken.catalog.spec import ModelSpec, Routed

Device = Literal["cpu", "cuda"]
FP32 = 4
GRAIN = 512  # bytes: torch's CUDA allocator gives whole multiples, and a slot's parts begin on one
DTYPES: Mapping[str, Encoding] = {"bfloat16": STORED["BF16"], "float32": STORED["F32"]}
"""Weight dtype -> how matrices are kept in it."""


@dataclass(frozen=True, slots=True)
class Storage:
    """Vectors, short convolutions and routers are fp32 everywhere: a router in bf16 flips near-ties."""

    device: Device
    matrices: Encoding  # outside the experts
    experts: Encoding
    number: int  # bytes of an activation and of a cached number

    def bytes(self, name: str, shape: tuple[int, ...]) -> int:
        """One tensor outside the experts, by its canonical name."""
        if ".router.table" in name:
            return prod(shape) * 8  # expert numbers, i64
        return prod(shape) * FP32 if _stays_fp32(name, shape) else self._encoding(name).size(shape)

    def _encoding(self, name: str) -> Encoding:
        """Blocks are for what is inside the layers: embedding and head are published plain beside them."""
        return self.matrices if self.matrices.block == 1 or name.startswith("layers.") else DTYPES["bfloat16"]


def storage(device: Device, dtype: str) -> Storage:
    """As the engine keeps a model whose stored encodings are all decoded into `dtype`. A CPU computes in fp32."""
    kept = DTYPES[dtype]
    return Storage(device, kept, kept, FP32 if device == "cpu" else 2)


@dataclass(frozen=True)
class Weights:
    """A model's tensors outside its experts, each kind of layer once, and its routed bodies."""

    groups: tuple[tuple[int, Shapes], ...]  # (how many alike, canonical name of one of them -> shape)
    routed: tuple[tuple[int, Routed], ...]  # (how many layers alike, body)

    def tensors(self) -> Iterator[tuple[int, str, tuple[int, ...]]]:
        """(how many, name of one, shape)."""
        return ((count, name, shape) for count, shapes in self.groups for name, shape in shapes.items())

    def bytes(self, kept: Storage) -> int:
        """Without the experts."""
        return sum(count * kept.bytes(name, shape) for count, name, shape in self.tensors())

    def rounding(self, kept: Storage) -> int:
        """What an allocator that gives whole GRAINs adds to `bytes`."""
        return sum(count * (-kept.bytes(name, shape) % GRAIN) for count, name, shape in self.tensors())

    def largest(self, kept: Storage) -> int:
        """Numbers of the largest matrix that is kept in blocks and read by more than a few rows at a time."""
        if kept.matrices.block == 1:
            return 0
        inner = (prod(shape) for _, name, shape in self.tensors() if name.startswith("layers.") and len(shape) == 2)
        return max(inner, default=0)


def weights_of(spec: ModelSpec) -> Weights:
    """By arithmetic over distinct layers: real models have a few kinds of layer and up to 90 000 tensors."""
    kinds = Counter(spec.layers)
    groups = [(1, frame_shapes(spec))]
    groups += [(count, layer_shapes(spec, spec.layers.index(layer))) for layer, count in kinds.items()]
    bodies = [(count, branch.body) for layer, count in kinds.items() for branch in layer.ffn]
    return Weights(tuple(groups), tuple((count, body) for count, body in bodies if isinstance(body, Routed)))


def expert_bytes(spec: ModelSpec, body: Routed, kept: Storage, grain: int = 1) -> int:
    """One expert: its matrices as stored and fp32 biases, each rounded up to whole `grain`s."""
    shapes = expert_shapes(spec, body).values()
    sizes = (kept.experts.size(shape) if len(shape) > 1 else prod(shape) * FP32 for shape in shapes)
    return sum(-(-size // grain) * grain for size in sizes)


def _stays_fp32(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) < 2 or ".router." in name or ".conv." in name
