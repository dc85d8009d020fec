"""Opens a checkpoint on disk: which family, which tensors, how stored. Reads headers only, never weights.

open_checkpoint answers before anything large is allocated: the set of tensors in the files must equal what the
configuration describes (expected.py), names and shapes. What is only half here is outline.py's.
Does not know memory, devices or tokenizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freetoken.catalog.encodings import ENCODINGS, TensorInfo, require_decodable
from freetoken.catalog.expected import expected
from freetoken.catalog.families.table import FAMILIES, find_family
from freetoken.catalog.generation import SamplingDefaults, sampling_defaults
from freetoken.catalog.gguf import GgufHeader, is_gguf, read_gguf
from freetoken.catalog.gguf_config import as_config, gguf_names
from freetoken.catalog.hf import Config, refuse_quantized
from freetoken.catalog.names import MappedTensor, NameMap, resolve
from freetoken.catalog.safetensors import read_folder
from freetoken.catalog.spec import ModelSpec, spec_faults
from freetoken.catalog.strict_json import read_object
from freetoken.core.errors import ConfigInvalid, ConfigMissing, TensorMismatch, UnsupportedEncoding

__all__ = ["Checkpoint", "TensorInfo", "TextSource", "open_checkpoint"]

_NAMED = 5  # tensors named in an error
_CONFIG_LIMIT = 16 << 20  # bytes


@dataclass(frozen=True, slots=True)
class TextSource:
    """Where the tokenizer and the chat template are."""

    kind: Literal["hf", "gguf"]
    path: Path  # the folder, or the .gguf file


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that the headers say."""

    path: Path
    format: Literal["safetensors", "gguf"]
    family: str
    spec: ModelSpec
    tensors: Mapping[str, MappedTensor]  # canonical name -> where and how; exactly expected(spec), of an outline less
    dtype: str  # the encoding that holds most bytes
    bytes_on_disk: int  # of the weight files
    bos_id: int | None
    eos_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    text: TextSource
    notes: tuple[str, ...] = ()  # of an outline: what is here, and what was taken from the configuration instead


@dataclass(frozen=True, slots=True)
class Description:
    """What a Hugging Face folder says beside its weights."""

    family: str
    spec: ModelSpec
    names: NameMap
    dtype: str  # as config.json spells it; empty where it does not say
    bos_id: int | None
    eos_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder, a .gguf file, or a folder that holds one .gguf file and no config.json.

    Raises a CheckpointError (core.errors) that says what is wrong; OSError where the disk fails.
    """
    file = gguf_of(path)
    return from_gguf(read_gguf(file)) if file else _open_folder(path)


def _open_folder(path: Path) -> Checkpoint:
    described = describe(path)
    tensors = read_folder(path)
    return from_folder(
        path,
        described,
        tensors=matched(described.spec, resolve(described.names, tensors)),
        dtype=main_encoding(tensors),
        bytes_on_disk=sum(file.stat().st_size for file in {tensor.file for tensor in tensors.values()}),
    )


def describe(path: Path) -> Description:
    """The folder's config.json and generation_config.json. Raises ConfigInvalid, UnsupportedArchitecture and
    UnsupportedEncoding."""
    whole = Config(read_object(path / "config.json", _CONFIG_LIMIT))
    family, config = find_family(whole)
    refuse_quantized(whole, tuple(ENCODINGS))
    refuse_quantized(config, tuple(ENCODINGS))
    if (path / "hf_quant_config.json").is_file():
        raise UnsupportedEncoding(
            f"the weights are quantised (hf_quant_config.json); supported are {', '.join(ENCODINGS)}"
        )
    spec, names = family.read(config)
    _refuse_contradictions(spec)
    generation = Config({}, "generation_config.json")
    if (path / generation.where).is_file():
        generation = Config(read_object(path / generation.where, _CONFIG_LIMIT), generation.where)
    spellings = (part.text(key, "") for part in (config, whole) for key in ("dtype", "torch_dtype"))
    return Description(
        family=family.name,
        spec=spec,
        names=names,
        dtype=next((dtype for dtype in spellings if dtype), ""),
        bos_id=next(iter(generation.integers("bos_token_id") or config.integers("bos_token_id")), None),
        eos_ids=generation.integers("eos_token_id") or config.integers("eos_token_id"),
        sampling_defaults=sampling_defaults(generation),
    )


def from_folder(
    path: Path,
    described: Description,
    *,
    tensors: Mapping[str, MappedTensor],
    dtype: str,
    bytes_on_disk: int,
    notes: tuple[str, ...] = (),
) -> Checkpoint:
    """The checkpoint of a folder, once its tensors are known."""
    return Checkpoint(
        path=path,
        format="safetensors",
        family=described.family,
        spec=described.spec,
        tensors=tensors,
        dtype=dtype,
        bytes_on_disk=bytes_on_disk,
        bos_id=described.bos_id,
        eos_ids=described.eos_ids,
        sampling_defaults=described.sampling_defaults,
        text=TextSource("hf", path),
        notes=notes,
    )


def from_gguf(header: GgufHeader, notes: tuple[str, ...] = ()) -> Checkpoint:
    """The checkpoint of a GGUF file. Raises as open_checkpoint."""
    config = as_config(header)
    family = FAMILIES[config.text("model_type")]
    spec, _ = family.read(config)
    _refuse_contradictions(spec)
    metadata = Config(header.metadata, header.path.name)
    ends = [metadata.integers(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    return Checkpoint(
        path=header.path,
        format="gguf",
        family=family.name,
        spec=spec,
        tensors=matched(spec, resolve(gguf_names(header, config), header.tensors)),
        dtype=main_encoding(header.tensors),
        bytes_on_disk=max(header.file_bytes, header.end),
        bos_id=next(iter(metadata.integers("tokenizer.ggml.bos_token_id")), None),
        eos_ids=tuple(dict.fromkeys(token for tokens in ends for token in tokens)),
        sampling_defaults={},
        text=TextSource("gguf", header.path),
        notes=notes,
    )


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that `path` means; None where it is a Hugging Face folder. Raises ConfigInvalid, ConfigMissing."""
    if not path.is_file():
        if (path / "config.json").is_file():
            return None
        path = _only_gguf(path)
    if not is_gguf(path):
        raise ConfigInvalid(
            f"{path.name} is no GGUF file",
            fixes=("give a .gguf file, or the folder that holds config.json and the weights",),
        )
    return path


def _only_gguf(folder: Path) -> Path:
    """The .gguf file of a folder without config.json."""
    if not folder.is_dir():
        raise ConfigMissing(f"{folder} does not exist", fixes=("check the path of the model",))
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigMissing(
            f"{folder.name} has no config.json and {len(files)} .gguf files",
            numbers={"gguf_files": len(files)},
            fixes=("give the path of the .gguf file that you mean",),
        )
    raise ConfigMissing(
        f"{folder} has no config.json", fixes=("give the folder that holds config.json and the weights",)
    )


def _refuse_contradictions(spec: ModelSpec) -> None:
    faults = spec_faults(spec)
    if faults:
        raise ConfigInvalid(f"the configuration contradicts itself: {'; '.join(faults[:_NAMED])}")


def matched(
    spec: ModelSpec, found: Mapping[str, MappedTensor], layers: Iterable[int] | None = None
) -> Mapping[str, MappedTensor]:
    """`found`, once it is known to be exactly what the spec describes; with `layers`, their part and the frame's.

    Raises TensorMismatch, UnsupportedEncoding.
    """
    numbers = range(len(spec.layers)) if layers is None else sorted(layers)
    experts = sum(body.router.experts for number, body in spec.routed() if number in numbers)
    if 3 * experts > len(found):  # before a list of names as long as the configuration likes is made
        raise TensorMismatch(
            f"the configuration describes {experts} experts of 3 tensors each, the files hold {len(found)} tensors",
            numbers={"experts": experts, "found": len(found)},
        )
    shapes = expected(spec, numbers)
    missing = [f"{name} is missing, expected {shapes[name]}" for name in shapes if name not in found]
    extra = [f"{name} {found[name].shape} is not expected" for name in found if name not in shapes]
    wrong = [
        f"{name} has shape {found[name].shape}, expected {shape}"
        for name, shape in shapes.items()
        if name in found and found[name].shape != shape
    ]
    faults = wrong + missing + extra
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise TensorMismatch(
            f"the files do not hold the model that the configuration describes: {'; '.join(faults[:_NAMED])}{more}",
            numbers={"missing": len(missing), "extra": len(extra), "wrong_shape": len(wrong)},
        )
    for tensor in found.values():
        for part in tensor.parts:
            require_decodable(part.tensor)
    return {name: found[name] for name in shapes}


def main_encoding(tensors: Mapping[str, TensorInfo]) -> str:
    """The encoding that holds most bytes."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.encoding] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else "F32"
