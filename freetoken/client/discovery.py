"""Finds the daemon of a state folder: runtime/daemon.json, checked against the process that it names.

A record is believed only if its pid runs and began when the record says: pids are used again. Whether that process
answers as ours is asked by control.py. Does not start or stop anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from freetoken.core.errors import DaemonError, DaemonNotReachable

START_TOLERANCE_S = 1.5  # clocks of psutil and of the record may be rounded apart


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """runtime/daemon.json."""

    url: str
    pid: int
    start_time: float  # unix seconds
    instance_id: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a daemon is and what opens its door. The token is never printed: it has no repr."""

    url: str
    pid: int
    start_time: float
    instance_id: str
    version: str
    token: str

    def __repr__(self) -> str:
        return f"Address({self.url}, pid {self.pid})"

    def running(self) -> bool:
        """Whether the very process that wrote the record still runs."""
        return process_is(self.pid, self.start_time)


def find(home: Path) -> Address:
    """The daemon of `home`. Raises DaemonNotReachable when none runs, saying what was found."""
    file = home / "runtime" / "daemon.json"
    try:
        record = msgspec.json.decode(file.read_bytes(), type=Record)
    except FileNotFoundError:
        raise _absent(f"no daemon runs for {home}") from None
    except (msgspec.DecodeError, OSError) as error:
        raise _absent(f"{file} cannot be read: {error}") from error
    if not process_is(record.pid, record.start_time):
        raise _absent(f"the daemon that {file} names (pid {record.pid}) has ended")
    return Address(**msgspec.structs.asdict(record), token=_token(home))


def process_is(pid: int, start_time: float) -> bool:
    """Whether process `pid` runs (a zombie does not) and began at `start_time`, unix seconds."""
    try:
        process = psutil.Process(pid)
        began: float = process.create_time()
        return abs(began - start_time) <= START_TOLERANCE_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # another user's process: it runs, and its start can not be seen
        return True


def _token(home: Path) -> str:
    try:
        return (home / "token").read_text().strip()
    except OSError as error:
        raise DaemonError(
            f"the token of the running daemon cannot be read: {error}", fixes=("ft daemon stop, then ft daemon start",)
        ) from error


def _absent(detail: str) -> DaemonNotReachable:
    return DaemonNotReachable(detail, fixes=("ft daemon start",))
