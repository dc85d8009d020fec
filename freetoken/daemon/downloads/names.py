"""Names that came from outside: repositories, revisions, files, digests, and what they become on this disk. Pure.

Every name is matched against a strict pattern before it is part of a path or an address; what does not match is refused
with UnsafeName, never repaired. The rules hold for every system at once: a model folder may move to another one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from freetoken.core.errors import UnsafeName

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_VARIANT = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w.-]{0,99}(/[A-Za-z0-9][\w.-]{0,99}){0,3}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_PART = re.compile(r"[A-Za-z0-9_][\w.+-]{0,199}", re.ASCII)
_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)  # whatever their extension
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SHOWN = 120  # characters of a name that an error quotes


@dataclass(frozen=True, slots=True)
class ModelName:
    """`org/name`, and of a repository of GGUF files which one: `org/name:VARIANT`."""

    repo: str
    variant: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Raises UnsafeName."""
        repo, colon, variant = text.partition(":")
        return cls(checked_repo(repo), checked_variant(variant) if colon else None)

    def __str__(self) -> str:
        return f"{self.repo}:{self.variant}" if self.variant else self.repo

    @property
    def folder(self) -> str:
        """Its folder below models/: no repository and no variant contains `--`, so that no two share one."""
        return str(self).replace("/", "--").replace(":", "--")


def checked_repo(text: str) -> str:
    """`org/name` under the hub's own rules, which also keep it unambiguous as a folder."""
    if not _REPO.fullmatch(text) or "--" in text or ".." in text or any(p[-1] in ".-" for p in text.split("/")):
        raise UnsafeName(
            f"{text[:_SHOWN]!r} is no repository: write org/name, as the hub shows it.",
            fixes=("ft search WORDS",),
            param="model",
        )
    if text.startswith("local/"):
        raise UnsafeName("local/ is for models of this machine's own folders.", param="model")
    return text


def checked_variant(text: str) -> str:
    if not _VARIANT.fullmatch(text) or "--" in text or ".." in text or text[-1] in ".-":
        raise UnsafeName(f"{text[:_SHOWN]!r} is no variant: write one such as Q4_K_M.", param="model")
    return text


def checked_revision(text: str) -> str:
    """A branch, tag, refs/pr/N or commit."""
    if not _REVISION.fullmatch(text) or ".." in text:
        raise UnsafeName(f"{text[:_SHOWN]!r} is no revision: write a branch, a tag or a commit.", param="revision")
    return text


def checked_commit(text: object) -> str:
    """What a hub calls a commit or a git object: 40 hexadecimal digits, nothing else."""
    if not isinstance(text, str) or not _COMMIT.fullmatch(text):
        raise UnsafeName(f"the hub names {str(text)[:_SHOWN]!r} where a git object must be.")
    return text


def checked_sha256(text: object) -> str:
    if not isinstance(text, str) or not _SHA256.fullmatch(text):
        raise UnsafeName(f"{str(text)[:_SHOWN]!r} is no SHA-256: 64 hexadecimal digits are.", param="sha256")
    return text


def refuse_hostile(name: object) -> str:
    """A file name in a listing that only an attack can mean, wanted or not, condemns the listing."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if not isinstance(name, str) or "\\" in name or _CONTROL.search(name) or {"", ".", ".."} & set(parts):
        raise UnsafeName(f"the repository lists a file named {str(name)[:_SHOWN]!r}; nothing is taken from it.")
    return name


def checked_file(name: str) -> str:
    """A relative name of plain parts: no parent, drive, stream, device, hidden or trailing-dot part."""
    for part in refuse_hostile(name).split("/"):
        if not _FILE_PART.fullmatch(part) or part.endswith(".") or _DEVICE.fullmatch(part):
            raise UnsafeName(f"the file {name[:_SHOWN]!r} has a name that not every system can keep.")
    return name


def inside(folder: Path, name: str) -> Path:
    """`folder/name`, which is inside `folder` after every symlink on the way. Raises UnsafeName."""
    path = folder / checked_file(name)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise UnsafeName(f"the file {name[:_SHOWN]!r} would leave its folder.")
    return path
