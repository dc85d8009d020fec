"""Which model with which options: what a load is asked for, and what a restarted daemon finds of it on disk.

runtime/wish.json names the model that is wanted and the engine process that was started for it, if it still is to live.
Does not know processes or how a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from freetoken.core.errors import SettingError
from freetoken.daemon import store
from freetoken.daemon.shelf import Shelved
from freetoken.settings.load import parse_options


@dataclass(frozen=True, slots=True)
class Wish:
    """What one load was asked for. `engine` is the instance id of the process that it got, once it has one."""

    row: Shelved
    options: Mapping[str, Any]
    engine: str | None = None

    def same_as(self, other: Wish | None) -> bool:
        return other is not None and (self.row.path, self.options) == (other.row.path, other.options)


class _Saved(msgspec.Struct, frozen=True):
    model: str
    path: str
    created: int
    options: dict[str, Any]
    engine: str | None = None


class WishFile:
    """runtime/wish.json: absent where no model is wanted."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, wish: Wish) -> None:
        """Raises OSError."""
        row = wish.row
        options = msgspec.to_builtins(dict(wish.options), enc_hook=_plain)
        saved = _Saved(row.id, str(row.path), row.created, options, wish.engine)
        store.write_json(self._path, msgspec.to_builtins(saved))

    def read(self) -> Wish | None:
        """None where there is none, or none that this version understands."""
        try:
            saved = msgspec.convert(store.read_json(self._path), _Saved)
            options = parse_options(saved.options)
        except (msgspec.ValidationError, SettingError):
            return None
        return Wish(Shelved(saved.model, Path(saved.path), saved.created), options, saved.engine)

    def let_go(self) -> None:
        """The engine is to end; the model may be wanted again when a daemon starts."""
        wish = self.read()
        if wish is not None and wish.engine is not None:
            self.write(replace(wish, engine=None))

    def clear(self) -> None:
        """No model is wanted any more."""
        self._path.unlink(missing_ok=True)


def _plain(value: object) -> int | float:
    """core.units, which msgspec does not take for the numbers they are."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be written")
