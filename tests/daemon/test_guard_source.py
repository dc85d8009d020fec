"""The guard's lines that are about the program and not about a request: what it never does, and what it is built on."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from freetoken.daemon.main import WORKER
from freetoken.settings.schema import KNOBS

ROOT = Path(__file__).parents[2]
FLOORS = {"fastapi": (0, 142), "starlette": (1, 10), "jinja2": (3, 1, 6)}


def trees() -> Iterator[tuple[str, ast.AST]]:
    for path in (ROOT / "freetoken").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            yield path.relative_to(ROOT).as_posix(), node


def test_nothing_unpickles_evaluates_or_asks_a_shell() -> None:
    found = []
    for path, node in trees():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [(path, name) for name in names if name.partition(".")[0] in {"pickle", "marshal", "shelve", "dill"}]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            bad = {"eval", "exec", "os.system", "os.popen", "torch.load", "subprocess.getoutput"}
            found += [(path, called)] if called in bad else []
            found += [(path, "shell") for word in node.keywords if word.arg in ("shell", "trust_remote_code")]
    assert found == []


def test_the_engine_program_is_absolute_and_no_option_of_a_load_is_a_path() -> None:
    assert os.path.isabs(WORKER[0])
    assert [knob.name for knob in KNOBS.values() if knob.scope == "load" and knob.kind == "path"] == []


def test_what_it_is_built_on_is_new_enough() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = dict(re.fullmatch(r"([\w.-]+?)>=([\d.]+).*", line).groups() for line in wanted if ">=" in line)  # type: ignore[union-attr]
    for name, least in FLOORS.items():
        assert tuple(int(part) for part in floors[name].split(".")) >= least
