"""Which files of a repository a load needs. Pure.

A Hugging Face model: its safetensors (those of the index, where there is one), configuration, tokenizer, chat template.
A repository of GGUF files: one variant, all parts of it. Pickle weights, other formats and documents are never taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from freetoken.catalog.safetensors import INDEX
from freetoken.core.errors import FileCorrupt, NothingToLoad, PickleOnly, UnsafeName, VariantNeeded, WeightsMissing
from freetoken.daemon.downloads.names import checked_file

Format = Literal["safetensors", "gguf"]

_BESIDE_WEIGHTS = frozenset(
    {
        "config.json",
        "generation_config.json",
        "hf_quant_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
    }
)
_MORE_TEMPLATES = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(.+)-\d{5}-of-\d{5}\.safetensors")
_PICKLE = re.compile(r"[^/]+\.(bin|pt|pth|ckpt)")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_NOT_A_MODEL = re.compile(r"(^|[-._])(mmproj|imatrix)", re.IGNORECASE)  # a vision projector, calibration data
_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:IQ\d|T?Q\d)(?:_[0-9A-Z]+)*|BF16|F16|FP16|F32|FP32|MXFP4(?:_MOE)?|NVFP4)$", re.IGNORECASE
)
_VARIANTS_NAMED = 12  # in an error


@dataclass(frozen=True, slots=True)
class RepoFile:
    """One file of a repository. At least one digest is known: SHA-256 of LFS content, or the id of its git blob."""

    name: str
    size: int  # bytes
    sha256: str | None = None
    blob_id: str | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """`local` is the name in the model's folder: a GGUF file loses the folders that it had in the repository."""

    file: RepoFile
    local: str


@dataclass(frozen=True, slots=True)
class Choice:
    format: Format
    variant: str | None  # of GGUF
    files: tuple[Chosen, ...]

    @property
    def bytes(self) -> int:
        return sum(chosen.file.size for chosen in self.files)


def choose(files: Sequence[RepoFile], variant: str | None = None, shards: Iterable[str] | None = None) -> Choice:
    """What to download. `shards` are the weight files that the index names, None where there is no index.

    Raises VariantNeeded, NothingToLoad, PickleOnly, WeightsMissing, FileCorrupt, UnsafeName.
    """
    names = {file.name for file in files}
    if variant is None and has_folder_model(files):
        weights = _shards(names, shards) if shards is not None else _weights(names)
        beside = {name for name in names if name in _BESIDE_WEIGHTS or _MORE_TEMPLATES.fullmatch(name)}
        wanted = sorted(beside | weights | ({INDEX} if shards is not None else set()))
        by_name = {file.name: file for file in files}
        return Choice("safetensors", None, _checked([Chosen(by_name[name], name) for name in wanted]))
    found = variants(files)
    if not found:
        _refuse(names)
    label = _variant(found, variant)
    return Choice("gguf", label, _checked([Chosen(file, file.name.rpartition("/")[2]) for file in found[label]]))


def has_folder_model(files: Iterable[RepoFile]) -> bool:
    """Whether there is a Hugging Face model to take, whatever GGUF files lie beside it."""
    names = {file.name for file in files}
    return "config.json" in names and bool(_weights(names))


def has_index(files: Iterable[RepoFile]) -> bool:
    return any(file.name == INDEX for file in files)


def variants(files: Iterable[RepoFile]) -> Mapping[str, tuple[RepoFile, ...]]:
    """The GGUF models of a repository by their label, smallest first: `Q4_K_M`, or the stem of the file where that says
    no quantisation or two models share it."""
    stems: dict[str, list[RepoFile]] = {}
    for file in sorted(files, key=lambda file: file.name):
        base = file.name.rpartition("/")[2]
        if base.lower().endswith(".gguf") and not _NOT_A_MODEL.search(base):
            stems.setdefault(_SPLIT.sub("", base[: -len(".gguf")]), []).append(file)
    labels: dict[str, list[str]] = {}
    for stem in stems:
        match = _QUANTISATION.search(stem)
        labels.setdefault(match[1].upper() if match else stem, []).append(stem)
    named = {label if len(same) == 1 else stem: tuple(stems[stem]) for label, same in labels.items() for stem in same}
    return dict(sorted(named.items(), key=lambda row: (sum(file.size for file in row[1]), row[0])))


def _variant(found: Mapping[str, tuple[RepoFile, ...]], asked: str | None) -> str:
    """The label that is meant; letters' case does not matter."""
    if asked is None and len(found) == 1:
        return next(iter(found))
    for label in found:
        if asked is not None and label.lower() == asked.lower():
            return label
    listed = [f"{label} ({sum(file.size for file in files) / 1e9:.1f} GB)" for label, files in found.items()]
    more = f" and {len(listed) - _VARIANTS_NAMED} more" if len(listed) > _VARIANTS_NAMED else ""
    what = f"there is no variant {asked!r}" if asked else f"the repository holds {len(found)} GGUF models"
    raise VariantNeeded(
        f"{what}: there is {', '.join(listed[:_VARIANTS_NAMED])}{more}.",
        fixes=("write org/name:VARIANT",),
        param="model",
    )


def _weights(names: set[str]) -> set[str]:
    """The safetensors of the model itself, as a load without an index would take them: those at the top."""
    top = {name for name in names if "/" not in name and name.endswith(".safetensors")}
    if _SINGLE in top:
        return {_SINGLE}
    numbered = {name for name in top if _NUMBERED.fullmatch(name)}
    ours = {name for name in numbered if name.startswith("model-")}
    return ours or numbered or top


def _shards(names: set[str], shards: Iterable[str]) -> set[str]:
    wanted = set(shards)
    for name in wanted:
        checked_file(name)
        if "/" in name or not name.endswith(".safetensors"):
            raise FileCorrupt(f"{INDEX} places tensors in {name[:100]!r}, which is no weight file of the model")
    missing = sorted(wanted - names)
    if missing or not wanted:
        raise WeightsMissing(
            f"{INDEX} names {len(wanted)} weight files; the repository lacks {len(missing)}: {', '.join(missing[:5])}",
            numbers={"files": len(wanted), "missing": len(missing)},
            fixes=("take another revision of the repository",),
        )
    return wanted


def _refuse(names: set[str]) -> None:
    if any(_PICKLE.fullmatch(name) for name in names):
        raise PickleOnly(
            "the repository holds pickle weights only; these can run code when opened and are not downloaded",
            fixes=("look for a safetensors or GGUF version: ft search WORDS",),
        )
    lacks = "config.json" if _weights(names) else "safetensors or GGUF weights"
    raise NothingToLoad(f"the repository has {len(names)} files, but no {lacks}", fixes=("ft search WORDS",))


def _checked(chosen: list[Chosen]) -> tuple[Chosen, ...]:
    """Safe names, no two of which are one file where letters' case does not count."""
    seen: set[str] = set()
    for one in chosen:
        key = checked_file(one.local).lower()
        if key in seen:
            raise UnsafeName(f"two files of the repository would be {one.local!r} on this disk.")
        seen.add(key)
    return tuple(chosen)
