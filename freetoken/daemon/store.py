"""The state folder on disk: its layout, the mark that it is ours, atomic JSON.

Layout (docs/contracts.md): freetoken-home.json, token, settings.json, operations.json, runtime/, models/, logs/. Does
not know what the files mean to others. Nothing is written into a folder that is not ours.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.core.errors import HomeNotOurs
from freetoken.daemon import native

LAYOUT = 1
MARK = "freetoken-home.json"
_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of one state folder."""

    root: Path

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def daemon_record(self) -> Path:
        return self.root / "runtime" / "daemon.json"

    @property
    def engine_record(self) -> Path:
        return self.root / "runtime" / "engine.json"

    @property
    def wish(self) -> Path:
        return self.root / "runtime" / "wish.json"

    @property
    def lock(self) -> Path:
        return self.root / "runtime" / "lock"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def residuals(self) -> Path:
        return self.root / "cache" / "residuals.json"

    @property
    def operations(self) -> Path:
        return self.root / "operations.json"


def open_home(root: Path) -> Home:
    """The folder, made where it is absent. Raises HomeNotOurs, having written nothing, if it belongs to another.

    Also where it cannot be written: on a read-only disk, or after somebody changed its rights.
    """
    check_owner(root)
    try:
        return _make(Home(root))
    except OSError as error:
        fixes = (f"Make {root} writable for you", "Set FREETOKEN_HOME to another folder")
        raise HomeNotOurs(f"{root} cannot be written: {error.strerror or error}.", fixes=fixes) from None


def read_or_make_token(home: Home) -> str:
    """The secret of the control API: 256 random bits in hex, made once, readable by its owner only."""
    try:
        token = home.token_file.read_text("ascii").strip()
    except FileNotFoundError:
        token = ""
    if len(token) < 2 * _TOKEN_BYTES:
        token = secrets.token_hex(_TOKEN_BYTES)
        _replace(home.token_file, token.encode("ascii") + b"\n")
    home.token_file.chmod(0o600)
    return token


def write_json(path: Path, value: Any) -> None:
    """Writes all of it or nothing, mode 0600: a reader never sees half a file."""
    _replace(path, json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")


def read_json(path: Path) -> Any | None:
    """The value, or None where the file is absent or not JSON (a disk that lied: the caller starts anew)."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def check_owner(root: Path) -> None:
    """Raises HomeNotOurs for a file, for a folder of another program, another user or another layout."""
    if not root.exists():
        return
    fixes = (f"Move {root} away, or set FREETOKEN_HOME to another folder",)
    if not root.is_dir():
        raise HomeNotOurs(f"{root} is not a folder.", fixes=fixes)
    if not native.is_ours(root):
        raise HomeNotOurs(f"{root} belongs to another user of this computer.", fixes=fixes)
    mark = read_json(root / MARK)
    if mark is None and any(root.iterdir()):
        raise HomeNotOurs(f"{root} is in use by another program: it has no {MARK}.", fixes=fixes)
    layout = mark.get("layout") if isinstance(mark, dict) else LAYOUT
    if layout != LAYOUT:
        raise HomeNotOurs(f"{root} has layout {layout}; this version knows layout {LAYOUT}.", fixes=fixes)


def _make(home: Home) -> Home:
    """Raises OSError."""
    home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (home.root / MARK).exists():
        write_json(home.root / MARK, {"layout": LAYOUT})
    home.root.chmod(0o700)
    for folder in (home.lock.parent, home.models, home.logs):
        folder.mkdir(mode=0o700, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return home


def _replace(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600 by definition
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
