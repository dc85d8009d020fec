"""Header index of safetensors checkpoints: one file or a folder of shards. Reads headers only.

File format (huggingface/safetensors, "Format"): 8 bytes little-endian header length N <= 100 MB, N bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end)}}, then the data, which the tensors cover without holes or overlaps.
Every number is checked against the file before it is used. `outline` reads the same headers where the data need not be
there, a hundred times as many tensors a second. Does not know families or what names mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import msgspec

from freetoken.catalog.encodings import STORED, TensorInfo
from freetoken.catalog.strict_json import LIMIT, parse_object, read_object
from freetoken.core.errors import FileCorrupt, PickleOnly, UnsupportedEncoding, WeightsMissing

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_DIMS = 8
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_NAMED = 5  # at most this many names in an error


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint in `folder`, by name.

    Raises WeightsMissing, PickleOnly, FileCorrupt, UnsupportedEncoding.
    """
    listed: set[str] = set()
    if (folder / INDEX).is_file():
        weight_map = _weight_map(folder)
        listed = set(weight_map)
        shards = sorted(set(weight_map.values()))
    else:
        shards = _unlisted_shards(folder)
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise WeightsMissing(
            f"{len(missing)} of {len(shards)} weight files are missing: {_some(missing)}",
            numbers={"missing": len(missing), "files": len(shards)},
            fixes=("download the model again; what is complete is kept",),
        )
    tensors: dict[str, TensorInfo] = {}
    for name in shards:
        for tensor in read_file(folder / name).values():
            if tensor.name in tensors:
                raise FileCorrupt(f"tensor {tensor.name} is in {tensors[tensor.name].file.name} and in {name}")
            tensors[tensor.name] = tensor
    absent = sorted(listed - tensors.keys())
    if absent:
        raise FileCorrupt(f"{INDEX} lists {len(absent)} tensors that no file holds: {_some(absent)}")
    return tensors


def read_file(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one file, by name. Raises FileCorrupt, UnsupportedEncoding."""
    header, start, size = _header(path)
    tensors = {
        name: _tensor(path, name, entry, start, size) for name, entry in header.items() if name != "__metadata__"
    }
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset != end:
            raise FileCorrupt(f"{path.name}: tensor {tensor.name} begins at byte {tensor.offset}, expected {end}")
        end += tensor.size
    if end != size:
        raise FileCorrupt(f"{path.name} has {size} bytes, its header describes {end}", numbers=_sizes(end, size))
    return tensors


# ── outlines ────────────────────────────────────────────────────────────────────────────────────────────────────────
class Entry(msgspec.Struct, gc=False):
    """One tensor as a header describes it."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Outline:
    """What is here of the weights of a folder."""

    files: int  # that the checkpoint has; 0: nobody says
    headers: tuple[Header, ...]  # of those that are here
    cut: int  # of these, how many end before their data does
    bytes_on_disk: int  # of all files; 0 where a file is missing and the index does not say

    @property
    def complete(self) -> bool:
        """Whether every file's header is here."""
        return 0 < self.files == len(self.headers)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file; tensors are checked when they are asked for."""

    path: Path
    start: int  # offset of the data
    end: int  # size of the whole file
    here: int  # how much of it there is
    entries: dict[str, Entry]
    sizes: dict[str, int]  # dtype -> bytes

    def tensor(self, name: str) -> TensorInfo:
        """Raises FileCorrupt, UnsupportedEncoding."""
        entry = self.entries[name]
        plain = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": list(entry.data_offsets)}
        return _tensor(self.path, name, plain, self.start, self.end)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, object] = {}  # msgspec copies it


def outline(folder: Path) -> Outline:
    """The headers that are in `folder`; files may be missing, or end after their header.

    Raises PickleOnly, FileCorrupt.
    """
    listed, shards, total = _shards_of(folder)
    found = [folder / name for name in shards if (folder / name).is_file()]
    headers = tuple(_light_header(path) for path in found)
    if listed and len(found) == len(shards):
        absent = listed.difference(*(header.entries for header in headers))
        if absent:
            raise FileCorrupt(f"{INDEX} lists {len(absent)} tensors that no file holds: {_some(sorted(absent))}")
    if len(found) == len(shards):
        total = sum(header.end for header in headers)
    return Outline(len(shards), headers, sum(header.here < header.end for header in headers), total)


def _shards_of(folder: Path) -> tuple[set[str], list[str], int]:
    """(tensors that the index names, files of the checkpoint, bytes that the index gives)."""
    if not (folder / INDEX).is_file():
        try:
            return set(), _unlisted_shards(folder), 0
        except WeightsMissing:
            return set(), [], 0
    index = _light_index(folder) or _Index(_weight_map(folder))  # the strict reader says what is wrong
    size = index.metadata.get("total_size", 0)
    return set(index.weight_map), sorted(set(index.weight_map.values())), size if type(size) is int else 0


def _light_index(folder: Path) -> _Index | None:
    """None where anything is odd about it."""
    if (folder / INDEX).stat().st_size > LIMIT:
        return None
    try:
        index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index)
    except _UNREADABLE:
        return None
    shards = set(index.weight_map.values())
    return index if shards and all(map(_is_plain, shards)) else None


def _light_header(path: Path) -> Header:
    with path.open("rb") as file:
        here = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if here < 8 or length > min(here - 8, LIMIT):
            raise FileCorrupt(
                f"{path.name} ends in its header or is no safetensors file: it claims a header of {length} bytes",
                numbers=_sizes(8 + length, here),
            )
        raw = file.read(length)
    try:
        entries = msgspec.json.decode(raw, type=dict[str, Entry])
    except _UNREADABLE as fault:
        raise FileCorrupt(f"the header of {path.name} is no header: {fault}") from fault
    entries.pop("__metadata__", None)
    sizes, data = dict.fromkeys((entry.dtype for entry in entries.values()), 0), 0
    for entry in entries.values():
        begin, end = entry.data_offsets
        sizes[entry.dtype] += end - begin
        data = max(data, end)
    return Header(path, 8 + length, 8 + length + data, here, entries, sizes)


# ── one header ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _header(path: Path) -> tuple[dict[str, object], int, int]:
    """(entries, offset of the data, size of the file)."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LIMIT):
            raise FileCorrupt(
                f"{path.name} is truncated or no safetensors file: it has {size} bytes and claims a header of {length}",
                numbers=_sizes(8 + length, size),
            )
        return parse_object(file.read(length), f"the header of {path.name}"), 8 + length, size


def _tensor(path: Path, name: str, entry: object, start: int, file_size: int) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(dims), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise FileCorrupt(f"{path.name}: tensor {name} has no dtype, shape and data_offsets")
    if len(dims) > _MAX_DIMS or not all(type(dim) is int and 0 <= dim < 1 << 48 for dim in dims):
        raise FileCorrupt(f"{path.name}: tensor {name} has shape {str(dims)[:100]}")
    if not 0 <= begin <= end:
        raise FileCorrupt(f"{path.name}: tensor {name} has data_offsets {begin}, {end}")
    if start + end > file_size:
        raise FileCorrupt(
            f"{path.name} is truncated: it has {file_size} bytes, tensor {name} ends at byte {start + end}",
            numbers=_sizes(start + end, file_size),
            fixes=("download the file again",),
        )
    if dtype not in STORED:
        raise UnsupportedEncoding(f"{path.name}: tensor {name} has the unknown dtype {dtype[:40]!r}")
    try:
        size = STORED[dtype].size(dims)
    except ValueError as fault:
        raise FileCorrupt(f"{path.name}: tensor {name}: {fault}") from fault
    if size != end - begin:
        raise FileCorrupt(
            f"{path.name}: tensor {name}, {dtype} {tuple(dims)}, needs {size} bytes and has {end - begin}",
            numbers=_sizes(size, end - begin),
        )
    return TensorInfo(name, dtype, tuple(dims), path, start + begin, size)


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> shard, from the index. Shards must be plain file names: the index may come from anywhere."""
    entries = read_object(folder / INDEX).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise FileCorrupt(f"{INDEX} has no weight_map")
    for shard in set(map(str, entries.values())):
        if not _is_plain(shard):
            raise FileCorrupt(f"{INDEX} places tensors in {shard[:100]!r}, which is no plain file name")
    return {name: str(shard) for name, shard in entries.items()}


def _is_plain(name: str) -> bool:
    """A name in the folder itself under the rules of every system: no separators, no drive, no parent, no NUL."""
    return (
        name not in ("", ".", "..")
        and "\0" not in name
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
        and name.endswith(".safetensors")
    )


def _unlisted_shards(folder: Path) -> list[str]:
    """The files of a folder without an index; of a numbered set, those that should be there too."""
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if _SINGLE in found:
        return [_SINGLE]
    numbered = [match for match in map(_NUMBERED.fullmatch, found) if match]
    if numbered:
        stem, total = numbered[0][1], numbered[0][3]
        return [f"{stem}-{number:05d}-of-{total}.safetensors" for number in range(1, int(total) + 1)]
    if found:
        return found
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    if pickles:
        raise PickleOnly(
            f"the weights are pickle files only ({_some(pickles)}); these can run code when opened and are not read",
            fixes=("use a safetensors version of the model, or convert it in an environment you trust",),
        )
    raise WeightsMissing(
        f"no .safetensors file in {folder}", fixes=("download the model's weights", "check the path of the model")
    )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _sizes(expected: int, found: int) -> dict[str, int | float | str]:
    return {"expected_bytes": expected, "found_bytes": found}
