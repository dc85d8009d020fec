"""Header of a GGUF file: metadata and where the tensors are. Reads the header only.

File format (ggml-org/ggml, docs/gguf.md), versions 2 and 3, little-endian: magic, version, tensor count, metadata
count, metadata (key, type, value), tensor descriptions, padding, data. Every count, length and offset is checked
against the file before it is used. Does not know families (gguf_config.py) or what metadata means.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from freetoken.catalog.encodings import STORED, Encoding, TensorInfo
from freetoken.core.errors import FileCorrupt, UnsupportedEncoding

Value = int | float | bool | str | list["Value"]

_MAGIC = b"GGUF"
_HEADER_LIMIT = 64 << 20  # bytes; a vocabulary of 262 144 tokens with its merges takes about 20 MB
_STRING_LIMIT = 16 << 20  # bytes
_ARRAY_LIMIT = 1 << 22  # elements
_KEY_LIMIT = 65535  # bytes, by the format
_MAX_DIMS = 4
_MAX_DEPTH = 2  # arrays in arrays
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""ggml's type numbers (ggml.h, enum ggml_type)."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    path: Path
    version: int
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    file_bytes: int  # as it lies here

    @property
    def end(self) -> int:
        """Where the last tensor ends: the size of the whole file."""
        return max((tensor.offset + tensor.size for tensor in self.tensors.values()), default=0)


def is_gguf(path: Path) -> bool:
    """Whether the file begins as GGUF does."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_gguf(path: Path, *, whole: bool = True) -> GgufHeader:
    """Parse the header. Raises FileCorrupt with numbers, UnsupportedEncoding for a version or type not known.

    `whole` False: the file may end anywhere after its header.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24:
            raise FileCorrupt(f"{path.name} has {size} bytes: too short for a GGUF file", numbers={"found_bytes": size})
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data, path.name), whole)


def _parse(path: Path, cursor: _Cursor, whole: bool) -> GgufHeader:
    if cursor.take(4) != _MAGIC:
        raise FileCorrupt(f"{path.name} is no GGUF file: it does not begin with {_MAGIC.decode()}")
    version = cursor.scalar("I")
    if version not in (2, 3):
        swapped = version in (2 << 24, 3 << 24)
        what = "big-endian" if swapped else f"GGUF version {version}"
        raise UnsupportedEncoding(f"{path.name} is {what}; supported are versions 2 and 3, little-endian")
    tensor_count, metadata_count = cursor.count("tensors", 24), cursor.count("metadata entries", 13)
    metadata: dict[str, Value] = {}
    for _ in range(metadata_count):
        key = cursor.string(_KEY_LIMIT)
        if key in metadata:
            raise cursor.corrupt(f"metadata key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    described = [_describe(cursor) for _ in range(tensor_count)]
    start = _aligned(cursor, _alignment(cursor, metadata))
    tensors: dict[str, TensorInfo] = {}
    for name, encoding, shape, offset in described:
        if name in tensors:
            raise cursor.corrupt(f"tensor {name} is there twice")
        tensors[name] = _place(cursor, TensorInfo(name, encoding.name, shape, path, start + offset, 0), whole)
    _refuse_overlaps(cursor, tensors)
    return GgufHeader(path, version, metadata, tensors, cursor.size)


def _describe(cursor: _Cursor) -> tuple[str, Encoding, tuple[int, ...], int]:
    """(name, encoding, row-major shape, offset in the data section) of the next tensor."""
    name = cursor.string(_KEY_LIMIT)
    dims = cursor.scalar("I")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.corrupt(f"tensor {name} has {dims} dimensions")
    fastest_first = [cursor.scalar("Q") for _ in range(dims)]
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    if kind not in _TYPES:
        raise UnsupportedEncoding(f"{cursor.name}: tensor {name} has the unknown type {kind}")
    return name, STORED[_TYPES[kind]], tuple(reversed(fastest_first)), offset


def _place(cursor: _Cursor, tensor: TensorInfo, whole: bool) -> TensorInfo:
    """The tensor with its size, checked against the file where that is `whole`."""
    try:
        size = STORED[tensor.encoding].size(tensor.shape)
    except ValueError as fault:
        raise cursor.corrupt(f"tensor {tensor.name}: {fault}") from fault
    if whole and tensor.offset + size > cursor.size:
        end = tensor.offset + size
        raise FileCorrupt(
            f"{cursor.name} is truncated: it has {cursor.size} bytes, tensor {tensor.name} ends at byte {end}",
            numbers={"expected_bytes": min(end, 1 << 63), "found_bytes": cursor.size},
            fixes=("download the file again",),
        )
    return TensorInfo(tensor.name, tensor.encoding, tensor.shape, tensor.file, tensor.offset, size)


def _refuse_overlaps(cursor: _Cursor, tensors: Mapping[str, TensorInfo]) -> None:
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset < end:
            raise cursor.corrupt(f"tensors {before} and {tensor.name} share bytes")
        end, before = tensor.offset + tensor.size, tensor.name


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment % 8:
        raise cursor.corrupt(f"general.alignment is {str(alignment)[:40]}, expected a multiple of 8")
    return alignment


def _aligned(cursor: _Cursor, alignment: int) -> int:
    return -(-cursor.at // alignment) * alignment


class _Cursor:
    """Reads values one after another and never past the end of the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self.name = name
        self.size = len(data)
        self._end = min(self.size, _HEADER_LIMIT)
        self.at = 0

    def corrupt(self, what: str) -> FileCorrupt:
        return FileCorrupt(f"{self.name}: {what}", numbers={"at_byte": self.at, "found_bytes": self.size})

    def take(self, length: int) -> bytes:
        self._require(length)
        self.at += length
        return self._data[self.at - length : self.at]

    def scalar(self, code: str) -> int:
        """One number of a struct format code that yields integers."""
        return int(struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0])

    def count(self, what: str, least_bytes: int) -> int:
        """A number of things that take at least so many bytes each, so that it cannot exceed the file."""
        count = self.scalar("Q")
        room = (self._end - self.at) // least_bytes
        if count > room:
            raise FileCorrupt(
                f"{self.name} claims {count} {what}; its {self.size} bytes have room for {room}",
                numbers={"claimed": count, "room": room, "found_bytes": self.size},
            )
        return count

    def string(self, limit: int = _STRING_LIMIT) -> str:
        return self._strings(1, limit)[0]

    def value(self, kind: int, depth: int = 0) -> Value:
        """One metadata value of the format's type number."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth + 1)
        return self._numbers(kind, 1)[0]

    def _array(self, depth: int) -> Value:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > _ARRAY_LIMIT or depth > _MAX_DEPTH:
            raise self.corrupt(f"an array of {count} elements at depth {depth} exceeds {_ARRAY_LIMIT} or {_MAX_DEPTH}")
        if kind == _STRING:
            return list(self._strings(count, _STRING_LIMIT))
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Value]:
        if kind not in _SCALARS:
            raise self.corrupt(f"value type {kind} is not known")
        code = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))

    def _strings(self, count: int, limit: int) -> list[str]:
        """A plain loop over locals: a vocabulary has hundreds of thousands of them."""
        data, end, at, unpack = self._data, self._end, self.at, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if end - at < 8:
                self._require(at + 8 - self.at)
            length = unpack(data, at)[0]
            at += 8
            if length > end - at or length > limit:
                raise self.corrupt(f"a string claims {length} bytes at byte {at}; allowed are {min(end - at, limit)}")
            # Descriptions cut in the middle of a character exist; tokens and names are always whole.
            strings.append(data[at : at + length].decode("utf-8", "replace"))
            at += length
        self.at = at
        return strings

    def _require(self, length: int) -> None:
        if length > self._end - self.at:
            raise FileCorrupt(
                f"{self.name} ends in its header: {length} bytes are needed at byte {self.at} of {self._end}",
                numbers={"expected_bytes": self.at + length, "found_bytes": self._end},
                fixes=("download the file again",),
            )
