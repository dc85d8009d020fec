"""cache/residuals.json: what loads were seen to take, by model and device, so that the next plan need not assume it.

Does not know what the lines mean (plan/compare.py). A file that cannot be read is begun anew: it is a memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from freetoken.daemon import store

_KEPT = 200  # models

log = logging.getLogger(__name__)


class Residuals:
    """Read anew at each call: it is small, and `ft plan` reads it beside a daemon that writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, model: str, device: str) -> dict[str, int]:
        """Ledger line -> bytes; empty where nothing is known."""
        return self._read().get(model, {}).get(device, {})

    def remember(self, model: str, device: str, lines: Mapping[str, int]) -> None:
        """Keep what a load showed; a disk that refuses it loses nothing but the memory."""
        if not lines:
            return
        table = self._read()
        devices = table.pop(model, {})
        table[model] = devices | {device: dict(lines)}
        newest = dict(list(table.items())[-_KEPT:])
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            store.write_json(self._path, newest)
        except OSError as error:
            log.warning("%s could not be written: %s", self._path.name, error)

    def _read(self) -> dict[str, dict[str, dict[str, int]]]:
        try:
            return msgspec.convert(store.read_json(self._path) or {}, dict[str, dict[str, dict[str, int]]])
        except msgspec.ValidationError as error:
            log.warning("%s is not readable and is begun anew: %s", self._path.name, error)
            return {}
