"""Opens a checkpoint on disk: which family, which tensors, how stored. Reads headers only, never weights.

open_checkpoint answers before anything large is allocated: the set of tensors in the files must equal what the
configuration describes (expected.py), names and shapes. Does not know memory, devices or tokenizers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from freetoken.catalog.encodings import ENCODINGS, TensorInfo, require_decodable
from freetoken.catalog.expected import expected, expert_count
from freetoken.catalog.families.table import FAMILIES, find_family
from freetoken.catalog.generation import SamplingDefaults, sampling_defaults
from freetoken.catalog.gguf import is_gguf, read_gguf
from freetoken.catalog.gguf_config import as_config, gguf_names
from freetoken.catalog.hf import Config, refuse_quantized
from freetoken.catalog.names import MappedTensor, resolve
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
    tensors: Mapping[str, MappedTensor]  # canonical name -> where and how; exactly expected(spec)
    dtype: str  # the encoding that holds most bytes
    bytes_on_disk: int  # of the weight files
    bos_id: int | None
    eos_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    text: TextSource


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder, a .gguf file, or a folder that holds one .gguf file and no config.json.

    Raises a CheckpointError (core.errors) that says what is wrong; OSError where the disk fails.
    """
    if path.is_file():
        return _open_gguf(path)
    if not (path / "config.json").is_file():
        return _open_gguf(_only_gguf(path))
    return _open_folder(path)


def _open_folder(path: Path) -> Checkpoint:
    whole = Config(read_object(path / "config.json", _CONFIG_LIMIT))
    family, config = find_family(whole)
    refuse_quantized(whole, tuple(ENCODINGS))
    refuse_quantized(config, tuple(ENCODINGS))
    if (path / "hf_quant_config.json").is_file():
        raise UnsupportedEncoding(
            f"the weights are quantised (hf_quant_config.json); supported are {', '.join(ENCODINGS)}"
        )
    spec, names = family.read(config)
    tensors = read_folder(path)
    generation = Config({}, "generation_config.json")
    if (path / generation.where).is_file():
        generation = Config(read_object(path / generation.where, _CONFIG_LIMIT), generation.where)
    return Checkpoint(
        path=path,
        format="safetensors",
        family=family.name,
        spec=spec,
        tensors=_matched(spec, resolve(names, tensors)),
        dtype=_main_encoding(tensors),
        bytes_on_disk=sum(file.stat().st_size for file in {tensor.file for tensor in tensors.values()}),
        bos_id=next(iter(generation.integers("bos_token_id") or config.integers("bos_token_id")), None),
        eos_ids=generation.integers("eos_token_id") or config.integers("eos_token_id"),
        sampling_defaults=sampling_defaults(generation),
        text=TextSource("hf", path),
    )


def _open_gguf(path: Path) -> Checkpoint:
    if not is_gguf(path):
        raise ConfigInvalid(
            f"{path.name} is no GGUF file",
            fixes=("give a .gguf file, or the folder that holds config.json and the weights",),
        )
    header = read_gguf(path)
    config = as_config(header)
    family = FAMILIES[config.text("model_type")]
    spec, _ = family.read(config)
    metadata = Config(header.metadata, path.name)
    ends = [metadata.integers(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    return Checkpoint(
        path=path,
        format="gguf",
        family=family.name,
        spec=spec,
        tensors=_matched(spec, resolve(gguf_names(header, config), header.tensors)),
        dtype=_main_encoding(header.tensors),
        bytes_on_disk=header.file_bytes,
        bos_id=next(iter(metadata.integers("tokenizer.ggml.bos_token_id")), None),
        eos_ids=tuple(dict.fromkeys(token for tokens in ends for token in tokens)),
        sampling_defaults={},
        text=TextSource("gguf", path),
    )


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


def _matched(spec: ModelSpec, found: Mapping[str, MappedTensor]) -> Mapping[str, MappedTensor]:
    """`found`, once it is known to be exactly what the spec describes. Raises ConfigInvalid, TensorMismatch."""
    faults = spec_faults(spec)
    if faults:
        raise ConfigInvalid(f"the configuration contradicts itself: {'; '.join(faults[:_NAMED])}")
    experts = expert_count(spec)
    if 3 * experts > len(found):  # before a list of names as long as the configuration likes is made
        raise TensorMismatch(
            f"the configuration describes {experts} experts of 3 tensors each, the files hold {len(found)} tensors",
            numbers={"experts": experts, "found": len(found)},
        )
    shapes = expected(spec)
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


def _main_encoding(tensors: Mapping[str, TensorInfo]) -> str:
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.encoding] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else "F32"
