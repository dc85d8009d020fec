"""The models on this machine: complete folders under models/, and local folders that were loaded by their path.

models/<org>--<name>/<revision>/model.json says {id, source, files, state}; only `complete` counts. A local folder is a
row whose `source` is {"path": ...}: its files stay where they are. Does not know what is in the files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.core.errors import ModelNotFound
from freetoken.daemon import store

MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95}(:[\w.-]{1,64})?)?", re.ASCII)
RECORD = "model.json"
_LINKED = "linked"  # the revision of a local folder


@dataclass(frozen=True, slots=True)
class Shelved:
    """One model that can be loaded."""

    id: str
    path: Path  # a folder, or a .gguf file
    created: int  # unix seconds: when its files were completed


class Shelf:
    """Reads `models` anew at each call: another program of ours may have just completed one."""

    def __init__(self, models: Path) -> None:
        self._models = models

    def rows(self) -> list[Shelved]:
        """All, by id; of several revisions the newest."""
        newest: dict[str, Shelved] = {}
        for record in sorted(self._models.glob(f"*/*/{RECORD}")):
            row = _row(record)
            if row is not None and (row.id not in newest or newest[row.id].created <= row.created):
                newest[row.id] = row
        return sorted(newest.values(), key=lambda row: row.id)

    def locate(self, model: str) -> Shelved:
        """The row of an id, or of the absolute path of a local folder or .gguf file. Raises ModelNotFound."""
        path = Path(model)
        return self.at(path) if path.is_absolute() else self.find(model)

    def find(self, model: str) -> Shelved:
        """The row of an id. Raises ModelNotFound with the ids that there are."""
        rows = self.rows()
        for row in rows:
            if row.id == model:
                return row
        known = ", ".join(row.id for row in rows)
        raise ModelNotFound(
            f"There is no model {model[:120]!r} on this machine" + (f"; there is {known}." if known else "."),
            fixes=("ft pull demo", "ft load /path/to/a/model/folder"),
            param="model",
        )

    def at(self, path: Path) -> Shelved:
        """The row that a local folder or .gguf file has, or would have: `local/<name>`. Writes nothing.

        Raises ModelNotFound where there is nothing at `path`.
        """
        if not _is_there(path):
            raise ModelNotFound(f"There is no folder or file at {path}.", param="model")
        name = re.sub(r"[^\w.-]+", "-", path.stem if path.suffix == ".gguf" else path.name, flags=re.ASCII)
        return Shelved(f"local/{name.strip('-.') or 'model'}", path, int(path.stat().st_mtime))

    def remember(self, row: Shelved) -> None:
        """Keep a local row, so that its id works from now on. A second folder of the same name takes the id over."""
        folder = self._models / row.id.replace("/", "--") / _LINKED
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = {"id": row.id, "source": {"path": str(row.path)}, "files": {}, "state": "complete"}
        store.write_json(folder / RECORD, record)


def _is_there(path: Path) -> bool:
    try:
        return path.is_dir() or path.is_file()
    except OSError:  # a name that no file system takes, a folder that we may not look into
        return False


def _row(record: Path) -> Shelved | None:
    facts = store.read_json(record)
    if not isinstance(facts, dict) or facts.get("state") != "complete":
        return None
    model, path = facts.get("id"), _path(record, facts)
    if not isinstance(model, str) or not MODEL_ID.fullmatch(model) or path is None:
        return None
    return Shelved(model, path, int(record.stat().st_mtime))


def _path(record: Path, facts: dict[str, Any]) -> Path | None:
    folder, source = record.parent, facts.get("source")
    if folder.name == _LINKED and isinstance(source, dict):
        path = Path(str(source.get("path")))
        return path if path.is_absolute() and path.exists() else None
    files = sorted(folder.glob("*.gguf"))
    return files[0] if files and not (folder / "config.json").exists() else folder
