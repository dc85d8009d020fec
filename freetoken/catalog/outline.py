"""A checkpoint of which only a part is here: enough to say what the model needs before it is downloaded.

Where every file's header is here, their tensors are checked as exactly as open_checkpoint does; layers that are alike
in configuration and files are checked once. Otherwise config.json alone says what the model is. Loading needs
open_checkpoint. Does not know memory or devices.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

from freetoken.catalog import safetensors
from freetoken.catalog.checkpoint import Checkpoint, Description, describe, from_folder, from_gguf, gguf_of, matched
from freetoken.catalog.encodings import TensorInfo
from freetoken.catalog.gguf import read_gguf
from freetoken.catalog.names import resolve
from freetoken.catalog.safetensors import Header, Outline
from freetoken.catalog.spec import ModelSpec
from freetoken.core.errors import FileCorrupt
from freetoken.core.units import Bytes

_LAYER = re.compile(r"\.(\d+)\.")
_SPELLINGS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # config.json's
_USUAL = "BF16"

Tensors = dict[tuple[str, str], tuple[str, tuple[int, ...]]]
"""(name before the layer's number, after it) -> (dtype, shape)."""


def outline(path: Path) -> Checkpoint:
    """As open_checkpoint, but weight files may be missing or end after their header; `notes` say what was there.

    Raises the CheckpointErrors of open_checkpoint, except those for missing data.
    """
    file = gguf_of(path)
    if file is None:
        return _outline_folder(path)
    header = read_gguf(file, whole=False)
    missing = header.end - header.file_bytes
    notes = (f"sizes from the header of {file.name}; {Bytes(missing)} of its weights are not here",)
    return from_gguf(header, notes if missing > 0 else ())


def _outline_folder(path: Path) -> Checkpoint:
    described, found = describe(path), safetensors.outline(path)
    if not found.complete:
        return _from_config(path, described, found)
    numbers, tensors = _distinct(described.spec, found.headers)
    notes = f"sizes from the headers of {found.files:,} weight files"
    if found.cut:
        notes += f", {found.cut:,} of which are not whole"
    return from_folder(
        path,
        described,
        tensors=matched(described.spec, resolve(described.names, tensors), numbers),
        dtype=_main_encoding(found.headers),
        bytes_on_disk=found.bytes_on_disk,
        notes=(notes,),
    )


def _from_config(path: Path, described: Description, found: Outline) -> Checkpoint:
    dtype = _SPELLINGS.get(described.dtype)
    here = f"{len(found.headers):,} of {found.files:,}" if found.files else "none"
    says = f"config.json says {dtype}" if dtype else f"{_USUAL} is assumed, config.json does not say"
    return from_folder(
        path,
        described,
        tensors={},
        dtype=dtype or _USUAL,
        bytes_on_disk=found.bytes_on_disk,
        notes=(f"sizes from config.json alone: of the weight files {here} are here; {says}",),
    )


def _distinct(spec: ModelSpec, headers: tuple[Header, ...]) -> tuple[set[int], dict[str, TensorInfo]]:
    """(layers to check, their tensors and all that are in no layer). The layers left out are each like one of them."""
    by_header = [(header, _by_layer(header)) for header in headers]
    layers: defaultdict[str, Tensors] = defaultdict(dict)
    for header, found in by_header:
        for number, tensors in found.items():
            if not tensors.keys().isdisjoint(layers[number]):
                raise FileCorrupt(f"{header.path.name} has tensors that another file has too")
            layers[number].update(tensors)
    firsts: dict[object, int] = {}
    twins = [firsts.setdefault(layer, number) for number, layer in enumerate(spec.layers)]
    alike = {n for n, twin in enumerate(twins) if n != twin and layers[str(n)] == layers[str(twin)]}
    left_out = set(map(str, alike))
    kept: dict[str, TensorInfo] = {}
    for header, found in by_header:
        for number in found.keys() - left_out:
            names = (f"{before}.{number}.{after}" if number else before for before, after in found[number])
            kept.update((name, header.tensor(name)) for name in names)
    return set(range(len(twins))) - alike, kept


def _by_layer(header: Header) -> dict[str, Tensors]:
    """A file's tensors by the first number in their names, as it is spelt; empty for those without."""
    layers: defaultdict[str, Tensors] = defaultdict(dict)
    split = _LAYER.split
    for name, entry in header.entries.items():
        before, *rest = split(name, 1)
        number, after = rest or ("", "")
        layers[number][before, after] = (entry.dtype, entry.shape)
    return layers


def _main_encoding(headers: tuple[Header, ...]) -> str:
    sizes: Counter[str] = Counter()
    for header in headers:
        sizes.update(header.sizes)
    return max(sizes, key=sizes.__getitem__, default=_USUAL)
