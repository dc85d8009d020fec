"""What a load would need, without loading: headers, the machine as it is or as it is described, a Plan.

Works without a daemon, without weights and without a GPU. Blocks (files): call it in a thread. Does not know HTTP or
terminals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from freetoken.catalog.outline import outline
from freetoken.core.errors import FileUnreadable
from freetoken.core.units import Bytes
from freetoken.daemon import native
from freetoken.plan import hardware
from freetoken.plan.choices import Requested
from freetoken.plan.ledger import Diagnosis, Plan
from freetoken.plan.placement import make_plan

GPU_ENGINE_MISSING = "GPU_ENGINE_MISSING"


def forecast(path: Path, options: Mapping[str, Any], vram: Bytes | None = None, ram: Bytes | None = None) -> Plan:
    """A plan for the model at `path`: a folder, a .gguf file, or config.json with whatever headers are there.

    `vram` describes a GPU with so much free, `ram` the host; None: this machine, and the CPU that this version
    computes on. Raises CheckpointError, SettingError.
    """
    machine = hardware.described(vram, ram, hardware.snapshot(native.memory_limit()))
    try:
        checkpoint = outline(path)
    except OSError as error:
        raise FileUnreadable(f"{error.filename or path} cannot be read: {error.strerror or error}.") from error
    plan = make_plan(checkpoint, Requested(**options), machine)
    notices = [Diagnosis("ESTIMATED", note, {}) for note in checkpoint.notes]
    if machine.gpus:
        detail = "the engine of this version computes on the CPU; this is what its GPU engine will need"
        notices.append(Diagnosis(GPU_ENGINE_MISSING, detail, {}))
    return replace(plan, notices=(*plan.notices, *notices))
