"""All that the checks look at, as frozen data: read by read_machine.py and read_home.py, faked by tests. Pure.

Each fact is its value or Unknown with a reason. Does not judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from freetoken.core.units import Bytes
from freetoken.daemon.doctor.verdict import Fact
from freetoken.daemon.failures import Failure
from freetoken.daemon.native import Commit
from freetoken.daemon.watch.probe import PinProbe, Probe


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory. `limit` is that of the container or control group, which `total` does not know."""

    total: Bytes
    available: Bytes
    limit: Bytes | None
    lock_limit: Bytes | None  # RLIMIT_MEMLOCK


@dataclass(frozen=True, slots=True)
class Torch:
    """The installed build, read as text. `cuda` is None for a build without."""

    version: str
    cuda: str | None  # "13.0"


@dataclass(frozen=True, slots=True)
class Program:
    """A program of the name `ft`. `ours` if it is part of this installation."""

    path: str
    ours: bool


@dataclass(frozen=True, slots=True)
class Installed:
    """The environment that the installer makes in the state folder. `problem` where its Python does not run."""

    folder: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Folder:
    """The state folder as it lies on disk."""

    path: str
    exists: bool
    foreign: str | None = None  # why it is not ours
    mine: bool = True  # whether this user owns it
    mode: int = 0o700  # permission bits; 0o700 where the system has none
    token_mode: int | None = None  # of the token; None where there is none
    missing: tuple[str, ...] = ()  # folders that belong in it


@dataclass(frozen=True, slots=True)
class Port:
    """The port that the daemon would take. `holder` names a stranger; "reserved" ones nobody may take."""

    number: int
    state: Literal["free", "ours", "other home", "stranger", "reserved"]
    holder: str | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """runtime/daemon.json: `stale` names a process that is gone, `silent` one that does not answer as ours."""

    state: Literal["none", "running", "stale", "silent"]
    pid: int | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model under models/, after its headers were read."""

    id: str
    state: Literal["complete", "partial", "corrupt", "missing", "unsupported", "unread"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Past:
    """The last failure, and the time of the newest load that went well (both RFC 3339)."""

    failure: Failure | None
    loaded_since: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """One snapshot."""

    gpus: Fact[Probe]
    pins: Fact[PinProbe]
    nvidia_devices: Fact[int | None]  # on the PCI bus
    system: Fact[str]  # Linux, WSL, Windows, macOS
    memory: Fact[Memory]
    commit: Fact[Commit | None]  # None: the system does not limit promises
    instructions: Fact[frozenset[str] | None]
    compilers: Fact[tuple[str, ...]]
    kernels: Fact[bool]  # whether freetoken_kernels is installed
    torch: Fact[Torch | None]
    programs: Fact[tuple[Program, ...]]  # `ft` on PATH, in its order
    installed: Fact[Installed | None]
    disk_free: Fact[Bytes]
    folder: Fact[Folder]
    port: Fact[Port]
    record: Fact[Record]
    models: Fact[tuple[Model, ...]]
    past: Fact[Past]
