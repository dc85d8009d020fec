"""Reads the machine and the installation. Never imports torch: its version is read as text.

Does not judge what it reads. Each reader may raise; gather.py turns that into "not known".
"""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import psutil

from freetoken.core.units import Bytes
from freetoken.daemon import native
from freetoken.daemon.doctor.facts import Installed, Memory, Program, Torch
from freetoken.daemon.store import Home
from freetoken.daemon.watch.ask import NoAnswer, ask
from freetoken.daemon.watch.probe import PinProbe, probe_pins
from freetoken.settings.load import child_environment

START_S = 3.0  # a Python that takes longer to print one word does not run
COMPILERS = ("c++", "g++", "clang++", "cl")
_HEAD = 4096  # bytes of a script in which its interpreter is named
_CUDA = re.compile(r"^cuda\b[^=]*=\s*'([\d.]+)'", re.MULTILINE)


def memory() -> Memory:
    host = psutil.virtual_memory()
    return Memory(Bytes(host.total), Bytes(host.available), native.memory_limit(), native.lock_limit())


def pins() -> PinProbe:
    return probe_pins(Bytes(psutil.virtual_memory().available))


def compilers() -> tuple[str, ...]:
    """Where C++ compilers are, in the order of their names."""
    return tuple(path for name in COMPILERS if (path := shutil.which(name)))


def kernels() -> bool:
    return find_spec("freetoken_kernels") is not None


def torch() -> Torch | None:
    """The build that is installed, out of its metadata and torch/version.py read as text."""
    try:
        found = distribution("torch")
    except PackageNotFoundError:
        return None
    cuda = _CUDA.search(Path(str(found.locate_file("torch/version.py"))).read_text("utf-8"))
    return Torch(found.version, cuda[1] if cuda else None)


def programs(path: str | None = None) -> tuple[Program, ...]:
    """Every `ft` of the search path (that of this process if None), first wins. None of them is run."""
    folders = (child_environment().get("PATH", "") if path is None else path).split(_SEPARATOR)
    found = (shutil.which("ft", path=folder) for folder in dict.fromkeys(folders) if folder)
    return tuple(Program(program, _is_ours(Path(program))) for program in found if program)


def installed(home: Home) -> Installed | None:
    """The installer's environment, its Python tried out; None where there is none."""
    folder = home.root / "venv"
    if not folder.exists():
        return None
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        return Installed(str(folder), "it has no Python")
    answer = ask([str(python), "-I", "-c", "import freetoken; print('{}')"], START_S)
    return Installed(str(folder), answer.reason if isinstance(answer, NoAnswer) else None)


def disk_free(home: Home) -> Bytes:
    """Where the state folder is, or will be."""
    return Bytes(shutil.disk_usage(next(place for place in (home.root, *home.root.parents) if place.exists())).free)


_SEPARATOR = ";" if sys.platform == "win32" else ":"


def _is_ours(program: Path) -> bool:
    """Whether it is the command beside this Python, or a script that starts this Python."""
    python = Path(sys.executable)
    if program.resolve().parent in (python.parent, Path(sys.prefix).resolve() / python.parent.name):
        return True
    with program.open("rb") as file:
        head = file.read(_HEAD)
    return str(python).encode() in head or str(python.resolve().parent / "ft").encode() in head
