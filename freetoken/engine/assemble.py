"""Puts an engine together: checkpoint and plan in, a runner that can answer out. Every stage is timed and reported.

Does not know the wire, requests or the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from freetoken.catalog.checkpoint import Checkpoint, open_checkpoint
from freetoken.catalog.spec import ModelSpec
from freetoken.core.errors import LoadCancelled
from freetoken.core.types import SamplingParams
from freetoken.engine.kv.layouts import allocate
from freetoken.engine.load.pipeline import load, verify
from freetoken.engine.load.sinks import ResidentSink
from freetoken.engine.models.build import Model, build
from freetoken.engine.runner.runner import Runner
from freetoken.engine.step import StepPlan, Work
from freetoken.plan.choices import Resolved

Report = Callable[[str, int, int, str], None]  # (phase, done, total, unit)


@dataclass(frozen=True, slots=True)
class Engine:
    """A model ready to run."""

    runner: Runner
    resolved: Resolved
    spec: ModelSpec
    measured: dict[str, int | float | str]  # <phase>_s, weights_bytes, kv_bytes, rss_bytes, process_bytes

    def close(self) -> None:
        """Free weights and caches; the runner answers no more."""
        self.runner.close()


def assemble(path: Path, resolved: Resolved, report: Report, cancelled: Callable[[], bool]) -> Engine:
    """Load the checkpoint at `path` as `resolved` says. Sets torch's thread count for this process.

    Phases, each reported at its start and end: resolve, verify, read_weights (in bytes), build_kv, warmup. Raises the
    CheckpointError that fits, UnsupportedArchitecture, LoadCancelled.
    """
    torch.set_num_threads(resolved.threads)
    stages = _Stages(report, cancelled)
    with stages.stage("resolve"):
        checkpoint = open_checkpoint(path)
        model = build(checkpoint.spec, weight_dtype=resolved.weight_dtype, context=resolved.max_seq_len)
    with stages.stage("verify"):
        verify(checkpoint.tensors, model.destinations)
    with stages.stage("read_weights", unit="bytes"):
        _read_weights(checkpoint, model, stages)
    with stages.stage("build_kv"):
        caches = [allocate(layer.mixer, resolved.num_pages, resolved.page_size) for layer in checkpoint.spec.layers]
        runner = Runner(model, caches, resolved.page_size)
    with stages.stage("warmup"):
        _warm_up(runner, resolved)
    measured: dict[str, int | float | str] = {
        **{f"{name}_s": round(seconds, 3) for name, seconds in stages.seconds.items()},
        "weights_bytes": model.weight_bytes,
        "kv_bytes": sum(cache.nbytes for cache in caches),
        "rss_bytes": psutil.Process().memory_info().rss,
        "process_bytes": _own_bytes(),
    }
    return Engine(runner, resolved, checkpoint.spec, measured)


def _own_bytes() -> int:
    """Resident memory that is this process's alone: weight files that are mapped count for nobody."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


class _Stages:
    """Times stages, says where the load is, and stops it between stages when it was cancelled."""

    def __init__(self, report: Report, cancelled: Callable[[], bool]) -> None:
        self.report, self.cancelled = report, cancelled
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, unit: str = "steps") -> Iterator[None]:
        if self.cancelled():
            raise LoadCancelled(f"the load was cancelled before {name}")
        started = time.perf_counter()
        if unit == "steps":
            self.report(name, 0, 1, unit)
        yield
        self.seconds[name] = time.perf_counter() - started
        if unit == "steps":
            self.report(name, 1, 1, unit)


def _read_weights(checkpoint: Checkpoint, model: Model, stages: _Stages) -> None:
    def progress(done: int, total: int) -> None:
        stages.report("read_weights", done, total, "bytes")

    with torch.inference_mode():
        load(checkpoint.tensors, ResidentSink(model.destinations), progress, stages.cancelled)


def _warm_up(runner: Runner, resolved: Resolved) -> None:
    """One short prompt and one decode in the first page, so that the first request does not pay for lazy set-up."""
    page, prompt = (0,), tuple(range(min(4, resolved.page_size - 1)))
    greedy = SamplingParams(temperature=0.0)
    runner.run(StepPlan((Work("warmup", prompt, 0, page, True, greedy),)))
    runner.run(StepPlan((Work("warmup", (0,), len(prompt), page, True, greedy),)))
    runner.clear()
