"""Is it what was announced? SHA-256 of LFS content, or the id that git gives a blob. Blocking: call it in a thread.

git's id (git-hash-object): SHA-1 over `blob <size>`, a NUL, the content. Does not know where the content comes from.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from freetoken.daemon.downloads.choose import RepoFile

CHUNK = 4 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    right: bool  # every digest that the hub gave is the one found; never where it gave none
    sha256: str


class Stopped(Exception):
    """The hashing was asked to end."""


def verify(path: Path, file: RepoFile, stop: threading.Event, hashed: Callable[[int], None]) -> Verdict:
    """The content of `path` held against the digests of `file`. `hashed` hears the length of every chunk.

    Raises Stopped, OSError.
    """
    sha256 = hashlib.sha256()
    blob = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            if stop.is_set():
                raise Stopped
            sha256.update(chunk)
            if file.blob_id is not None:
                blob.update(chunk)
            hashed(len(chunk))
    announced = {(file.sha256, sha256.hexdigest()), (file.blob_id, blob.hexdigest())}
    known = [expected == found for expected, found in announced if expected is not None]
    return Verdict(bool(known) and all(known), sha256.hexdigest())
