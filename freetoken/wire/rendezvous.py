"""runtime/engine.json: where an engine listens and the secret that opens it; written before the engine is started.

The daemon writes it (0600) with an address, a nonce and an instance id, and adds pid and start time of the process as
soon as there is one: whoever reads it later can tell that process from a stranger with its number. The secret never is
in an argument list or an environment. Knows files; does not know sockets or processes.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

import msgspec

from freetoken.core.errors import EngineStartFailed
from freetoken.wire import channel
from freetoken.wire.messages import PROTO

DEFAULT_ORPHAN_GRACE_S = 60.0


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """The file's fields. `pid` and `start_time` (unix seconds) are None until the process has started."""

    socket: str
    nonce: str
    instance_id: str
    proto: int = PROTO
    orphan_grace_s: float = DEFAULT_ORPHAN_GRACE_S  # how long an engine without its daemon lives; 0: ends at once
    pid: int | None = None
    start_time: float | None = None
    daemon_pid: int | None = None  # who waits for the engine: it does not wait for a daemon that is gone

    @classmethod
    def new(cls, orphan_grace_s: float = DEFAULT_ORPHAN_GRACE_S) -> Rendezvous:
        """A fresh address, secret (256 bits) and instance id."""
        instance_id = secrets.token_hex(8)
        return cls(
            socket=channel.private_address(instance_id),
            nonce=secrets.token_urlsafe(32),
            instance_id=instance_id,
            orphan_grace_s=orphan_grace_s,
            daemon_pid=os.getpid(),
        )

    @classmethod
    def read(cls, path: Path) -> Rendezvous:
        """Raises EngineStartFailed when the file is not there or is not one of ours."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise EngineStartFailed(f"The runtime file {path.name} cannot be used: {error}.") from error

    @classmethod
    def find(cls, path: Path) -> Rendezvous | None:
        """What an earlier daemon left; None where that is nothing that can be used."""
        try:
            return cls.read(path)
        except EngineStartFailed:
            return None

    def write(self, path: Path) -> None:
        """Atomically, readable by this user only. Raises OSError."""
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
