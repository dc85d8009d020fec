"""The one file of the daemon that asks which operating system it runs on: locks, process groups, kernel counters,
limits of memory, what the processor can do.

Does not know what is locked, started or killed, nor why.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.core.units import Bytes

_UNLIMITED = 1 << 60  # version 1 of cgroups writes "no limit" as a number near 2^63
# winnt.h, PF_*_INSTRUCTIONS_AVAILABLE
_WINDOWS_FEATURES = {39: "avx", 40: "avx2", 41: "avx512f"}


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


def dump_stacks(pid: int) -> bool:
    """Ask an engine process to write the stack of each of its threads to its output. False where there is no way to."""
    if sys.platform == "win32":
        return False
    try:
        os.kill(pid, signal.SIGUSR1)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def is_ours(path: Path) -> bool:
    """Whether `path` belongs to the user that this process runs as."""
    return sys.platform == "win32" or path.stat().st_uid == os.getuid()


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


def system_name() -> str:
    """`Linux`, `WSL`, `Windows` or `macOS`."""
    if "microsoft" in platform.release().lower() and sys.platform == "linux":
        return "WSL"
    return {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}.get(sys.platform, sys.platform)


def memory_limit(root: Path = Path("/")) -> Bytes | None:
    """The least memory limit of this process's control group and the groups around it; None where there is none.

    Both versions of cgroups (kernel documentation, admin-guide/cgroup-v2 and cgroup-v1/memory). In a container the
    group's path may be that of the host, of which only the outermost part is to be seen.
    """
    limits = [limit for folder, file in _groups(root) if (limit := _number(folder / file)) is not None]
    return Bytes(min(limits)) if limits else None


def lock_limit() -> Bytes | None:
    """How much this process may lock into memory by RLIMIT_MEMLOCK; None where nothing is said or nothing limits."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else Bytes(soft)


@dataclass(frozen=True, slots=True)
class Commit:
    """Memory that the system promises to all programs together: RAM and page files."""

    limit: Bytes
    free: Bytes


def commit_limit() -> Commit | None:
    """Where the system keeps its promises: Windows always, Linux under vm.overcommit_memory = 2. Else None."""
    if sys.platform == "win32":
        return _windows_commit()
    if _number(Path("/proc/sys/vm/overcommit_memory")) != 2:
        return None
    words = (line.split() for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    kib = {word[0].rstrip(":"): int(word[1]) for word in words}
    return Commit(Bytes(kib["CommitLimit"] << 10), Bytes(max(0, kib["CommitLimit"] - kib["Committed_AS"]) << 10))


def cpu_features() -> frozenset[str] | None:
    """Instruction sets by the kernel's names (`avx2`, `avx512f`, `asimd`); None where the system does not say."""
    if sys.platform == "win32":
        import ctypes

        present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return frozenset(name for number, name in _WINDOWS_FEATURES.items() if present(number))
    if platform.machine() in ("arm64", "aarch64"):
        return frozenset({"asimd"})  # part of every 64-bit ARM
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), None)
    return None if flags is None else frozenset(flags.split())


def nvidia_devices(root: Path = Path("/")) -> int | None:
    """Display controllers of NVIDIA on the PCI bus, with or without a driver; None where the system does not say."""
    bus = root / "sys/bus/pci/devices"
    if not bus.is_dir():
        return None
    cards = (device for device in bus.iterdir() if _text(device / "vendor") == "0x10de")
    return sum(_text(card / "class").startswith("0x03") for card in cards)


def is_mine(path: Path) -> bool:
    """Whether this user owns `path`. Raises OSError. True on Windows, where access lists decide."""
    return sys.platform == "win32" or path.stat().st_uid == os.geteuid()


def _groups(root: Path) -> Iterator[tuple[Path, str]]:
    """(folder of a control group that holds this process, name of the file with its limit)."""
    mounts = {
        "": ((root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"), "memory.max"),
        "memory": ((root / "sys/fs/cgroup/memory",), "memory.limit_in_bytes"),
    }
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, inside = line.split(":", 2)
        places, file = mounts.get("memory" if "memory" in controllers.split(",") else controllers, ((), ""))
        group = Path(inside.lstrip("/"))
        yield from ((place / part, file) for place in places for part in (group, *group.parents))


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None


def _text(path: Path) -> str:
    """What the kernel says in `path`; nothing where it does not."""
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""


if sys.platform == "win32":

    def _windows_commit() -> Commit:
        """MEMORYSTATUSEX of sysinfoapi.h; its "page file" is the commit limit."""
        import ctypes

        class Status(ctypes.Structure):
            _fields_ = [
                ("length", ctypes.c_ulong),
                ("load", ctypes.c_ulong),
                *((name, ctypes.c_ulonglong) for name in ("ram", "ram_free", "commit", "commit_free", "space", "left")),
                ("extended", ctypes.c_ulonglong),
            ]

        status = Status(length=ctypes.sizeof(Status))
        if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            raise ctypes.WinError()
        return Commit(Bytes(status.commit), Bytes(status.commit_free))
