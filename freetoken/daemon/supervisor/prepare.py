"""What a load needs before any process starts, the checkpoint's facts, the plan, the tokenizer; and what it taught.

All of it blocks (files, hashes, tables of 100 000 tokens): the actor calls it in threads. Does not know processes.
The parts are values so that a test can put others in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from freetoken.catalog.checkpoint import Checkpoint, TextSource, open_checkpoint
from freetoken.core.units import Bytes
from freetoken.daemon import native
from freetoken.daemon.residuals import Residuals
from freetoken.daemon.supervisor.probe import MemoryProbe, NoGpu
from freetoken.plan import compare, hardware
from freetoken.plan.choices import Requested
from freetoken.plan.placement import make_plan
from freetoken.plan.report import plan_error, to_json
from freetoken.text.codec import TextCodec

PlanJson = dict[str, Any]


def plan_for(
    checkpoint: Checkpoint, options: Mapping[str, Any], released: Bytes, residuals: Residuals | None = None
) -> PlanJson:
    """The plan JSON for this machine; `released` is what an engine that is about to end holds. Raises PlanError."""
    machine = hardware.snapshot(native.memory_limit())
    machine = replace(machine, ram_free=Bytes(machine.ram_free + released))
    measured = residuals.of(str(checkpoint.path), "cpu") if residuals else None
    plan = make_plan(checkpoint, Requested(**options), machine, measured)
    refusal = plan_error(plan)
    if refusal is not None:
        raise refusal
    return to_json(plan)


def conclude(
    path: Path, plan: Mapping[str, Any], measured: Mapping[str, Any], residuals: Residuals | None = None
) -> dict[str, Any]:
    """What a finished load took beside what was planned: the data of plan.compared. The next plan knows it too."""
    if residuals is not None:
        residuals.remember(str(path), plan["resolved"]["device"]["value"], compare.residual(plan, measured))
    return compare.compared(plan, measured)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a load is made of."""

    worker: tuple[str, ...]  # the engine program: absolute, with its fixed arguments
    open: Callable[[Path], Checkpoint] = open_checkpoint
    plan: Callable[[Checkpoint, Mapping[str, Any], Bytes], PlanJson] = plan_for
    text: Callable[[TextSource], TextCodec] = TextCodec.load
    conclude: Callable[[Path, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = conclude
    probe: MemoryProbe = field(default_factory=NoGpu)


def parts(worker: tuple[str, ...], residuals: Residuals) -> Parts:
    """The parts of a real load, which learns from the ones before."""
    return Parts(worker, plan=partial(plan_for, residuals=residuals), conclude=partial(conclude, residuals=residuals))
