"""A snapshot of this machine as the planner sees it. Pure data, and one function that reads it.

Knows memory and cores. Does not know GPUs yet: the engine of this build runs on a CPU, and says so in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.units import Bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """`ram_free` is what a new process may take without swapping."""

    ram_total: Bytes
    ram_free: Bytes
    cores: int  # physical, at least 1


def snapshot() -> Machine:
    """Reads total and available memory and the physical cores this process may use."""
    import psutil

    memory = psutil.virtual_memory()
    physical = psutil.cpu_count(logical=False) or 1
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else physical
    return Machine(Bytes(memory.total), Bytes(memory.available), max(1, min(physical, allowed)))
