"""The daemon's half of the house imports without torch: the static rule cannot see a parent package's __init__."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCKED = ("torch", "triton", "numpy", "transformers")
TORCH_FREE = ("core", "settings", "catalog", "plan", "text", "wire", "api", "client", "daemon", "cli")
TORCH_FREE_ENGINE = ("engine/scheduler", "engine/paging", "engine/step.py", "engine/worker.py", "engine/status.py")

PROBE = """
import importlib, sys
from importlib.abc import MetaPathFinder
class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not for this half of the house")
sys.meta_path.insert(0, Blocker())
for name in {names!r}:
    importlib.import_module(name)
print(len({names!r}))
"""


def modules() -> list[str]:
    roots = [ROOT / "freetoken" / part for part in (*TORCH_FREE, *TORCH_FREE_ENGINE)]
    files = [f for root in roots for f in ([root] if root.suffix else root.rglob("*.py"))]
    names = [f.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for f in files]
    return sorted(name.removesuffix(".__init__") for name in names)


def test_every_torch_free_module_imports_with_torch_blocked() -> None:
    probe = PROBE.format(blocked=BLOCKED, names=modules())
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == len(modules()) > 50


def test_the_probe_can_fail() -> None:
    probe = PROBE.format(blocked=BLOCKED, names=["freetoken.engine.assemble"])
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "not for this half" in done.stderr
