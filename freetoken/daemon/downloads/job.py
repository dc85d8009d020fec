"""A download as a value: what is fetched, in which state it is, the legal moves between states. Pure.

The record is what job.json keeps: no token, and no address that holds one. Does not know how files arrive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from freetoken.daemon.downloads.choose import RepoFile


class DownloadState(StrEnum):
    QUEUED = "queued"  # others are before it
    RUNNING = "running"
    PAUSED = "paused"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # the daemon ended while it ran
    COMPLETED = "completed"  # verified, and on the shelf
    CANCELLED = "cancelled"  # nothing of it is kept

    @property
    def active(self) -> bool:
        return self in (DownloadState.QUEUED, DownloadState.RUNNING)

    @property
    def final(self) -> bool:
        return not MOVES[self]


_S = DownloadState
MOVES: dict[DownloadState, frozenset[DownloadState]] = {
    _S.QUEUED: frozenset({_S.RUNNING, _S.PAUSED, _S.FAILED, _S.INTERRUPTED, _S.CANCELLED}),
    _S.RUNNING: frozenset({_S.PAUSED, _S.FAILED, _S.INTERRUPTED, _S.COMPLETED, _S.CANCELLED}),
    _S.PAUSED: frozenset({_S.QUEUED, _S.CANCELLED}),
    _S.FAILED: frozenset({_S.QUEUED, _S.CANCELLED}),
    _S.INTERRUPTED: frozenset({_S.QUEUED, _S.PAUSED, _S.CANCELLED}),
    _S.COMPLETED: frozenset(),
    _S.CANCELLED: frozenset(),
}


class FileRecord(msgspec.Struct, frozen=True):
    """One file: its name in the repository (empty for a plain address), its name on this disk, what it must be."""

    remote: str
    local: str
    size: int
    sha256: str | None = None
    blob_id: str | None = None

    @property
    def announced(self) -> RepoFile:
        return RepoFile(self.remote, self.size, self.sha256, self.blob_id)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Of a repository: `repo` and `commit`. Of a plain address: `url`, and the SHA-256 begins `commit`."""

    model: str  # the id that the shelf will give it
    repo: str | None
    url: str | None
    commit: str
    license: str | None
    files: tuple[FileRecord, ...]
    created: str  # RFC 3339
    updated: str
    state: DownloadState = DownloadState.QUEUED
    error: Mapping[str, Any] | None = None  # problem+json of `failed`

    @property
    def id(self) -> str:
        """The same for the same content, so that who asks twice joins, also after a restart."""
        return f"dl_{hashlib.sha256(f'{self.model}@{self.commit}'.encode()).hexdigest()[:16]}"

    @property
    def folder(self) -> str:
        """Where it will be, below models/."""
        return f"{self.model.replace('/', '--').replace(':', '--')}/{self.commit}"

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def source(self) -> dict[str, str | None]:
        """What model.json says of where it came from."""
        kept = {"repo": self.repo, "url": self.url, "revision": self.commit, "license": self.license}
        return {name: value for name, value in kept.items() if value is not None}

    def moved(self, state: DownloadState, now: str, error: Mapping[str, Any] | None = None) -> Record:
        """This download in another state; an illegal move is a fault of ours."""
        if state not in MOVES[self.state]:
            raise RuntimeError(f"a download cannot go from {self.state} to {state}")
        return msgspec.structs.replace(self, state=state, updated=now, error=error)
