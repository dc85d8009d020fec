"""Header index of safetensors checkpoints: one file or a folder of shards. Reads headers only.

File format (huggingface/safetensors, "Format"): 8 bytes little-endian header length N <= 100 MB, N bytes of JSON
{name: {dtype, shape, data_offsets: [begin, end)}}, then the data, which the tensors cover without holes or overlaps.
Every number is checked against the file before it is used. Does not know families or what names mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from freetoken.catalog.encodings import STORED, TensorInfo
from freetoken.catalog.strict_json import LIMIT, parse_object, read_object
from freetoken.core.errors import FileCorrupt, PickleOnly, UnsupportedEncoding, WeightsMissing

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_DIMS = 8
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
