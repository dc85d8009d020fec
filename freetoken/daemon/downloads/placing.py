"""The disk around a download: room for it, its folder, and the move onto the shelf. Blocking: call it in a thread.

A model appears in models/ in one move, with its model.json inside. Does not know where bytes come from.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freetoken.core.errors import DiskFull
from freetoken.core.units import Bytes
from freetoken.daemon import store
from freetoken.daemon.shelf import RECORD


def check_room(folder: Path, needed: int, promised: int) -> None:
    """Raises DiskFull where the disk of `folder` lacks `needed` bytes beside those `promised` to other downloads."""
    free = shutil.disk_usage(folder).free
    if needed + promised > free:
        others = f", of which {Bytes(promised)} are for other downloads" if promised else ""
        raise DiskFull(
            f"it needs {Bytes(needed)} more on this disk, {Bytes(free)} are free{others}.",
            numbers={"needed_bytes": needed, "free_bytes": free, "promised_bytes": promised},
            fixes=(
                f"free {Bytes(needed + promised - free)}",
                "delete a model that is not needed: ft models rm",
                "set FREETOKEN_HOME to a folder on a larger disk",
            ),
        )


def is_complete(target: Path) -> bool:
    """Whether a model is on the shelf there."""
    facts = store.read_json(target / RECORD)
    return isinstance(facts, dict) and facts.get("state") == "complete"


def publish(files: Path, target: Path, record: Mapping[str, Any]) -> None:
    """The verified folder `files` becomes `target`. Safe to end in the middle of, and to call again."""
    if is_complete(target):
        return
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.exists():  # without model.json: no model, and nobody else of ours writes there
        shutil.rmtree(target)
    store.write_json(files / RECORD, record)
    try:
        os.replace(files, target)
    except OSError as error:
        if error.errno != errno.EXDEV:  # models/ may be a link to another disk
            raise
        _carry_over(files, target, record)


def _carry_over(files: Path, target: Path, record: Mapping[str, Any]) -> None:
    """Copies between disks; the record comes last, so that half a copy is no model."""
    arriving = target.with_name(f".{target.name}")
    shutil.rmtree(arriving, ignore_errors=True)
    shutil.copytree(files, arriving, ignore=shutil.ignore_patterns(RECORD))
    os.replace(arriving, target)
    store.write_json(target / RECORD, record)
