"""The one file of the daemon that asks which operating system it runs on: locks, process groups, kernel counters.

Does not know what is locked, started or killed, nor why.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any


class FileLock:
    """An advisory lock on a file, held by this process until release() or its end, however that comes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> FileLock | None:
        """The lock, or None where another process holds it. Never waits."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _lock(descriptor)
        except OSError:
            os.close(descriptor)
            return None
        return cls(descriptor)

    def release(self) -> None:
        os.close(self._descriptor)


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def listening_socket(host: str, port: int) -> socket.socket:
    """Bound and listening, so that a caller that comes early waits instead of being refused. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it a reply waits 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform == "win32":  # where SO_REUSEADDR would share the port with a stranger
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:  # a port in TIME_WAIT may be taken again
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(512)
    except OSError:
        sock.close()
        raise
    return sock


def own_group() -> dict[str, Any]:
    """Arguments of subprocess that put a child into a group of its own: a Ctrl-C here does not reach it."""
    if sys.platform == "win32":
        import subprocess

        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}


def end_group(pid: int, *, force: bool) -> None:
    """Ask the group that `pid` leads to end, or kill it. Nothing if it is gone."""
    try:
        if sys.platform == "win32":
            os.kill(pid, signal.SIGTERM)  # TerminateProcess: Windows has no polite way for a console-less child
        else:
            os.killpg(pid, signal.SIGKILL if force else signal.SIGTERM)
    except (ProcessLookupError, PermissionError):
        return


def signal_name(exit_code: int) -> str | None:
    """The signal that a negative exit code of subprocess stands for."""
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def kernel_oom_kills() -> int | None:
    """How many processes this kernel has killed for lack of memory, or None where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text("ascii")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)
