"""One daemon for each state folder: the lock, runtime/daemon.json, the port, and what to do when one is there already.

A record is believed only if its process runs, began when the record says, and answers with the record's instance id.
Does not know what the daemon serves.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from freetoken.client.discovery import process_is
from freetoken.core.errors import DaemonError, PortInUse, SettingError
from freetoken.daemon import native, store
from freetoken.daemon.state import API_VERSION, SERVICE, Identity
from freetoken.daemon.store import Home

ASK_S = 2.0
APPEAR_S = 15.0  # another daemon holds the lock: until it says where it is
LEAVE_S = 45.0  # an older daemon was asked to end: its engine has its own deadline in this
NEXT_PORTS = 20

_TAKEN = frozenset({errno.EADDRINUSE, errno.EACCES, getattr(errno, "WSAEACCES", errno.EACCES)})


@dataclass(frozen=True, slots=True)
class Record:
    """runtime/daemon.json."""

    url: str
    pid: int
    start_time: float  # unix seconds
    instance_id: str
    version: str
    api_version: str = API_VERSION

    @classmethod
    def of(cls, identity: Identity) -> Record:
        return cls(
            url=identity.url,
            pid=identity.pid,
            start_time=identity.start_time,
            instance_id=identity.instance_id,
            version=identity.version,
        )


@dataclass(frozen=True, slots=True)
class Claimed:
    """The port, and a sentence for the user where it is not the one they expect."""

    socket: socket.socket
    port: int
    note: str | None = None


def write_record(home: Home, identity: Identity) -> None:
    store.write_json(home.daemon_record, msgspec.to_builtins(Record.of(identity)))


def remove_record(home: Home, identity: Identity) -> None:
    """Only our own: a successor may have written its already."""
    record = read_record(home)
    if record is not None and record.instance_id == identity.instance_id:
        home.daemon_record.unlink(missing_ok=True)


def read_record(home: Home) -> Record | None:
    """The record as it is, believed or not; None where there is none that can be read."""
    try:
        return msgspec.convert(store.read_json(home.daemon_record), Record)
    except msgspec.ValidationError:
        return None


def running(home: Home) -> Record | None:
    """The daemon of this folder that answers now."""
    record = read_record(home)
    if record is None or not process_is(record.pid, record.start_time):
        return None
    answer = _ask(record, "GET", "/api/v1/live")
    ours = answer is not None and (answer.get("service"), answer.get("instance_id")) == (SERVICE, record.instance_id)
    return record if ours else None


def take_place(home: Home, version: str) -> native.FileLock | Record:
    """The lock of this folder, or the daemon of the same version that has it. An older one is asked to end first.

    Raises DaemonError for a newer one, for one that does not answer, and for one that does not leave.
    """
    lock = native.FileLock.take(home.lock)
    if lock is not None:
        return lock
    other = _appearing(home)
    if isinstance(other, native.FileLock):
        return other
    if other.version == version:
        return other
    if _number(other.version) > _number(version):
        raise DaemonError(
            f"A newer daemon ({other.version}) runs at {other.url}; this is {version}.", fixes=("ft daemon stop",)
        )
    _ask(other, "POST", "/api/v1/daemon/shutdown", store.read_or_make_token(home))
    return _lock_within(home, LEAVE_S, f"The older daemon ({other.version}, pid {other.pid}) did not end")


def claim_port(host: str, port: int, *, given: bool) -> Claimed:
    """A listening socket. A port that the user gave must be free; from the default one we move up.

    Raises PortInUse naming the holder, SettingError for an address that is not of this machine.
    """
    first = _try(host, port)
    if first is not None:
        return Claimed(first, first.getsockname()[1])
    holder = port_holder(port)
    if given:
        raise PortInUse(
            f"Port {port} is held by {holder}.",
            numbers={"port": port},
            fixes=("Choose another --port", "Stop that program"),
        )
    candidates = (*range(port + 1, min(port + 1 + NEXT_PORTS, 65536)), 0)
    found = next(sock for sock in (_try(host, candidate) for candidate in candidates) if sock is not None)
    chosen = found.getsockname()[1]
    return Claimed(found, chosen, f"port {port} is held by {holder}; listening on {chosen} instead")


def port_holder(port: int) -> str:
    """Who listens on `port`, as far as this user may see; nobody does where the system keeps it for itself."""
    try:
        listening = [
            c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
        ]
        pid = next((connection.pid for connection in listening if connection.pid), None)
        unknown = "another program" if listening else "the system (it is reserved, or needs more rights)"
        return f"{psutil.Process(pid).name()} (pid {pid})" if pid else unknown
    except (psutil.Error, OSError):
        return "another program"


def _try(host: str, port: int) -> socket.socket | None:
    try:
        return native.listening_socket(host.strip("[]"), port)
    except OSError as error:
        if error.errno in _TAKEN:
            return None
        raise SettingError(f"host: {host} cannot be listened on: {error.strerror or error}.", param="host") from None


def _appearing(home: Home) -> Record | native.FileLock:
    """The daemon that holds the lock, once it answers; or the lock, where it ended meanwhile."""
    deadline = time.monotonic() + APPEAR_S
    while time.monotonic() < deadline:
        record = running(home)
        if record is not None:
            return record
        lock = native.FileLock.take(home.lock)
        if lock is not None:
            return lock
        time.sleep(0.1)
    raise DaemonError(
        f"Another daemon holds {home.lock} but did not answer within {APPEAR_S:g} s.", fixes=("End that process",)
    )


def _lock_within(home: Home, seconds: float, complaint: str) -> native.FileLock:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lock = native.FileLock.take(home.lock)
        if lock is not None:
            return lock
        time.sleep(0.1)
    raise DaemonError(f"{complaint} within {seconds:g} s.", fixes=("ft daemon stop",))


def _ask(record: Record, method: str, path: str, token: str | None = None) -> dict[str, Any] | None:
    """The JSON answer, or None where nobody answers like that."""
    import http.client  # needed only where another daemon runs, and slow to import

    connection = http.client.HTTPConnection(record.url.removeprefix("http://"), timeout=ASK_S)
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request(method, path, headers=headers)
        answer = json.loads(connection.getresponse().read(1 << 16))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return answer if isinstance(answer, dict) else None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
