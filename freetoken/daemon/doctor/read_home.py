"""Reads the state folder, its daemon, its port and its models. Changes nothing; does not judge.

Each reader may raise; gather.py turns that into "not known".
"""

from __future__ import annotations

import errno
import http.client
import json
import stat
import sys
import time
from pathlib import Path
from typing import Any

from freetoken.catalog.checkpoint import open_checkpoint
from freetoken.client.discovery import process_is
from freetoken.core.errors import (
    CheckpointError,
    FreeTokenError,
    HomeNotOurs,
    UnsupportedArchitecture,
    UnsupportedEncoding,
)
from freetoken.daemon import discovery, failures, native, store
from freetoken.daemon.doctor.facts import Folder, Model, Past, Port, Record
from freetoken.daemon.shelf import RECORD
from freetoken.daemon.state import SERVICE
from freetoken.daemon.store import Home

ANSWER_S = 1.5  # of whoever holds the port
MODELS_S = 5.0  # models that are not reached in this time are said to be unread
PRIVILEGED = 1024


def folder(home: Home) -> Folder:
    root = home.root
    if not root.exists():
        return Folder(str(root), exists=False)
    if not native.is_mine(root):  # and perhaps not ours to look into
        return Folder(str(root), exists=True, mine=False, mode=_mode(root))
    token = home.token_file
    return Folder(
        path=str(root),
        exists=True,
        foreign=_foreign(root),
        mode=_mode(root),
        token_mode=_mode(token) if token.exists() else None,
        missing=tuple(place.name for place in (home.lock.parent, home.models, home.logs) if not place.is_dir()),
    )


def port(home: Home, host: str, number: int) -> Port:
    """Tries to listen, for a moment; asks whoever holds it."""
    running = discovery.running(home)
    if running is not None and running.url.rpartition(":")[2] == str(number):
        return Port(number, "ours")
    try:
        native.listening_socket(host.strip("[]"), number).close()
    except OSError as error:
        return _taken(number, host, reserved=error.errno in (errno.EACCES, getattr(errno, "WSAEACCES", errno.EACCES)))
    return Port(number, "free")


def record(home: Home) -> Record:
    written = discovery.read_record(home)
    if written is None:
        return Record("none") if not home.daemon_record.exists() else Record("stale")
    if not process_is(written.pid, written.start_time):
        return Record("stale", written.pid, written.url)
    return Record("running" if discovery.running(home) else "silent", written.pid, written.url)


def models(home: Home, seconds: float = MODELS_S) -> tuple[Model, ...]:
    """Every record under models/, whatever it says, its headers read."""
    until = time.monotonic() + seconds
    records = sorted(home.models.glob(f"*/*/{RECORD}"))
    return tuple(_model(record) if time.monotonic() < until else Model(_name(record), "unread") for record in records)


def past(home: Home) -> Past:
    operations = store.read_json(home.operations)
    loads = [
        str(row.get("updated"))
        for row in (operations if isinstance(operations, list) else ())
        if isinstance(row, dict) and (row.get("kind"), row.get("state")) == ("load", "succeeded")
    ]
    return Past(failures.last(home), max(loads, default=None))


def _foreign(root: Path) -> str | None:
    try:
        store.check_owner(root)
    except HomeNotOurs as error:
        return error.detail
    return None


def _mode(path: Path) -> int:
    """Permission bits; as they should be on Windows, where access lists decide."""
    if sys.platform == "win32":
        return 0o700 if path.is_dir() else 0o600
    return stat.S_IMODE(path.stat().st_mode)


def _taken(number: int, host: str, *, reserved: bool) -> Port:
    if reserved:
        return Port(number, "reserved", "needs more rights" if number < PRIVILEGED else None)
    answer = _live(host, number)
    ours = answer is not None and answer.get("service") == SERVICE
    return Port(number, "other home" if ours else "stranger", discovery.port_holder(number))


def _live(host: str, number: int) -> dict[str, Any] | None:
    """What GET /live gives; None where nobody answers in JSON."""
    connection = http.client.HTTPConnection({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), number, ANSWER_S)
    try:
        connection.request("GET", "/live")
        answer = json.loads(connection.getresponse().read(1 << 16))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return answer if isinstance(answer, dict) else None


def _model(record: Path) -> Model:
    facts = store.read_json(record)
    if not isinstance(facts, dict) or not isinstance(facts.get("id"), str):
        return Model(_name(record), "corrupt", f"{RECORD} cannot be read")
    name = facts["id"]
    if facts.get("state") != "complete":
        return Model(name, "partial", f"it is {facts.get('state')}")
    source = facts.get("source")
    linked = source.get("path") if isinstance(source, dict) else None
    place = Path(linked) if isinstance(linked, str) else _files(record.parent)
    if not place.exists():
        return Model(name, "missing", f"nothing is at {place}")
    return _wrong_size(name, record.parent, facts.get("files")) or _opened(name, place)


def _files(folder: Path) -> Path:
    variants = sorted(folder.glob("*.gguf"))
    return variants[0] if variants and not (folder / "config.json").exists() else folder


def _wrong_size(name: str, folder: Path, files: object) -> Model | None:
    """A file that is not there, or not as long as when its download was complete."""
    for file, facts in files.items() if isinstance(files, dict) else ():
        size = facts.get("size") if isinstance(facts, dict) else None
        path = folder / str(file)
        if not path.is_file():
            return Model(name, "partial", f"{file} is missing")
        if isinstance(size, int) and path.stat().st_size != size:
            return Model(name, "corrupt", f"{file} has {path.stat().st_size:,} of {size:,} bytes")
    return None


def _opened(name: str, place: Path) -> Model:
    try:
        open_checkpoint(place)
    except (UnsupportedArchitecture, UnsupportedEncoding) as error:
        return Model(name, "unsupported", error.detail)
    except CheckpointError as error:
        return Model(name, "corrupt", error.detail)
    except (FreeTokenError, OSError) as error:
        return Model(name, "unread", str(error))
    return Model(name, "complete")


def _name(record: Path) -> str:
    return record.parent.parent.name.replace("--", "/")
