"""What a load needs before any process starts: the checkpoint's facts, the plan, the tokenizer.

All of it blocks (files, hashes, tables of 100 000 tokens): the actor calls it in threads. Does not know processes.
The parts are values so that a test can put others in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freetoken.catalog.checkpoint import Checkpoint, TextSource, open_checkpoint
from freetoken.core.units import Bytes
from freetoken.plan import hardware
from freetoken.plan.choices import Requested
from freetoken.plan.placement import make_plan
from freetoken.plan.report import to_json
from freetoken.text.codec import TextCodec

PlanJson = dict[str, Any]


def plan_for(checkpoint: Checkpoint, options: Mapping[str, Any], released: Bytes) -> PlanJson:
    """The plan JSON for this machine; `released` is what an engine that is about to end holds. Raises PlanError."""
    machine = hardware.snapshot()
    machine = replace(machine, ram_free=Bytes(machine.ram_free + released))
    plan = make_plan(checkpoint, Requested(**options), machine)
    refusal = plan.error()
    if refusal is not None:
        raise refusal
    return to_json(plan)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a load is made of."""

    worker: tuple[str, ...]  # the engine program: absolute, with its fixed arguments
    open: Callable[[Path], Checkpoint] = open_checkpoint
    plan: Callable[[Checkpoint, Mapping[str, Any], Bytes], PlanJson] = plan_for
    text: Callable[[TextSource], TextCodec] = TextCodec.load
