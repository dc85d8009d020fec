"""`python -m tests.fakes.engine_process --runtime FILE`: the real worker around FakeRunner instead of a model.

The load's `files["model"]` is a JSON file: `{"step_s", "hang_s", "errors": {step: kind}, "load": kind, "load_s"}`; any
of them may be absent. A kind is one of FAULTS.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from freetoken.core.errors import HostRamTooSmall, LoadCancelled, OutOfMemory
from freetoken.engine.paging.rules import Layout
from freetoken.engine.worker import Cancelled, Report, exit_now, main
from freetoken.plan.choices import Resolved
from tests.fakes.runner import FakeRunner

FAULTS: dict[str, Callable[[], Exception]] = {
    "memory": lambda: OutOfMemory("no memory", numbers={"needed": 7}),
    "allocation": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    "bug": lambda: ZeroDivisionError("a bug"),
    "small": lambda: HostRamTooSmall("Needs 9 GiB; 2 GiB is free.", numbers={"needed": 9, "free": 2}),
}


@dataclass
class FakeBuilt:
    runner: FakeRunner
    resolved: Resolved
    measured: dict[str, int | float | str | bool | None] = field(default_factory=lambda: {"weights_bytes": 12})

    def close(self) -> None:
        print("closed", flush=True)


def assemble(path: Path, resolved: Resolved, report: Report, cancelled: Cancelled) -> FakeBuilt:
    wanted = json.loads(path.read_text())
    deadline = time.monotonic() + wanted.get("load_s", 0.0)
    report("read_weights", 0, 100, "bytes")
    while time.monotonic() < deadline:
        if cancelled():
            raise LoadCancelled("The load was cancelled.")
        time.sleep(0.01)
    report("read_weights", 100, 100, "bytes")
    if "load" in wanted:
        raise FAULTS[wanted["load"]]()
    runner = FakeRunner(Layout(resolved.page_size), resolved, step_s=wanted.get("step_s", 0.0))
    runner.errors = {int(step): FAULTS[kind]() for step, kind in wanted.get("errors", {}).items()}
    return FakeBuilt(runner, resolved)


if __name__ == "__main__":
    exit_now(main(assemble=assemble))
