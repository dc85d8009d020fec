"""Why the last engine or load failed, kept in logs/last-failure.json for those who ask after the daemon has ended.

Only the newest is kept: it is written whenever the engine's state becomes `failed`, and stays when a later load
succeeds. Does not know why things fail.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from freetoken.daemon import store
from freetoken.daemon.state import EngineState
from freetoken.daemon.store import Home

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """`problem` is problem+json, with its detail and its fixes."""

    time: str  # RFC 3339
    model: str | None
    problem: Mapping[str, Any]


def remember(home: Home, state: EngineState) -> None:
    """Keep the failure in `state`. A full disk must not end the work that is only being noted."""
    try:
        store.write_json(_file(home), asdict(Failure(state.since, state.model, dict(state.failure or {}))))
    except OSError as error:
        log.warning("last-failure.json could not be written: %s", error)


def last(home: Home) -> Failure | None:
    """The newest failure; None where nothing failed yet. Raises OSError where it cannot be read."""
    try:
        return msgspec.convert(store.read_json(_file(home)), Failure)
    except msgspec.ValidationError:  # nothing there, or another version's file
        return None


def _file(home: Home) -> Path:
    return home.logs / "last-failure.json"
