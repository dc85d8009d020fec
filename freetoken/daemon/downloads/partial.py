"""One file while it arrives: the bytes, and a journal of which of them are there.

Below the download's folder: parts/<name> (as long as the whole file from the start), journal/<name>.json, and
files/<name> once the content was verified. The journal is written after the data it speaks of has reached the disk, so
that neither a killed process nor a lost machine makes it promise too much; what came after it is fetched again. Does
not know HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from freetoken.daemon import store
from freetoken.daemon.downloads.names import inside

PART_BYTES = 64 << 20


class Journal(msgspec.Struct):
    """`done[i]` bytes are there from the start of part i; parts are `part` bytes long, the last one what is left."""

    size: int
    part: int
    done: list[int]
    etag: str | None = None  # of the server that has the bytes
    sha256: str | None = None  # of the whole content, once it was verified


class Partial:
    """Opened with what an earlier process left, if that still fits; else from nothing."""

    def __init__(self, folder: Path, name: str, size: int, part_bytes: int = PART_BYTES) -> None:
        self.name, self.size = name, size
        self.path = inside(folder / "parts", name)
        self.final = inside(folder / "files", name)
        self._record = inside(folder / "journal", f"{name}.json")
        for path in (self.path, self.final, self._record):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._journal = self._read() or self._fresh(part_bytes)

    # ── what is there ──
    @property
    def have(self) -> int:
        return sum(self._journal.done)

    @property
    def sha256(self) -> str | None:
        """Set where the content was verified."""
        return self._journal.sha256

    @property
    def etag(self) -> str | None:
        return self._journal.etag

    @etag.setter
    def etag(self, etag: str | None) -> None:
        self._journal.etag = etag

    def pending(self) -> list[int]:
        """The parts that lack bytes."""
        return [index for index in range(len(self._journal.done)) if self.missing(index)]

    def missing(self, index: int) -> range:
        """The offsets that a part lacks."""
        begin = index * self._journal.part
        return range(begin + self._journal.done[index], min(begin + self._journal.part, self.size))

    # ── what arrives ──
    @contextmanager
    def writer(self, index: int) -> Iterator[Writer]:
        """Writes on where the part ends."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.missing(index).start)
            yield Writer(file.fileno(), self._journal, index)

    def save(self) -> None:
        """The journal as it is now, after the data."""
        copy = msgspec.to_builtins(self._journal)
        if self.path.exists():
            descriptor = os.open(self.path, os.O_RDWR)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        store.write_json(self._record, copy)

    def restart(self, *, whole: bool = False) -> int:
        """Forget what is there; `whole`: as one part from now on. The number of bytes forgotten."""
        forgotten = self.have
        self._record.unlink(missing_ok=True)
        self._journal = self._fresh(max(1, self.size) if whole else self._journal.part)
        return forgotten

    def accept(self, sha256: str) -> None:
        """The content was verified: it becomes files/<name>. Safe to end in the middle of, and to call again."""
        self._journal.sha256 = sha256
        if not self.final.exists():
            self.save()
            os.replace(self.path, self.final)

    # ── how it begins ──
    def _read(self) -> Journal | None:
        try:
            journal = msgspec.convert(store.read_json(self._record), Journal)
        except msgspec.ValidationError:
            return None
        lengths = [min(journal.part, self.size - begin) for begin in range(0, self.size, max(1, journal.part))]
        data = self.final if journal.sha256 and self.final.exists() else self.path
        whole = journal.size == self.size and len(journal.done) == len(lengths)
        fits = whole and all(0 <= done <= length for done, length in zip(journal.done, lengths, strict=True))
        there = data.is_file() and not data.is_symlink() and data.stat().st_size == self.size
        return journal if fits and there else None

    def _fresh(self, part_bytes: int) -> Journal:
        self.path.unlink(missing_ok=True)  # whatever it is: never written through
        self.final.unlink(missing_ok=True)
        with self.path.open("xb") as file:
            file.truncate(self.size)
        return Journal(self.size, part_bytes, [0] * len(range(0, self.size, part_bytes)))


class Writer:
    """The end of one part."""

    def __init__(self, descriptor: int, journal: Journal, index: int) -> None:
        self._descriptor, self._journal, self._index = descriptor, journal, index

    def write(self, data: bytes) -> None:
        """All of `data`; counted as far as it got. Raises OSError."""
        left = memoryview(data)
        while left:
            count = os.write(self._descriptor, left)
            self._journal.done[self._index] += count
            left = left[count:]


def bytes_kept(folder: Path) -> int:
    """What the journals of a download's folder say is there."""
    total = 0
    for path in (folder / "journal").rglob("*.json"):
        try:
            total += sum(msgspec.convert(store.read_json(path), Journal).done)
        except msgspec.ValidationError:
            continue  # begun anew when its file is opened
    return total
