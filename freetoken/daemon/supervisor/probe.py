"""The port to whoever knows what GPUs hold for whom. Pure.

Does not know how that is asked.
"""

from __future__ import annotations

from typing import Protocol

from freetoken.core.units import Bytes


class MemoryProbe(Protocol):
    """What an unload asks before it is done."""

    async def held_by(self, pid: int) -> Bytes | None:
        """GPU memory that is charged to the process; None where nobody can tell. Bounded in time."""
        ...


class NoGpu:
    """The probe where models are computed on the CPU: nothing is held."""

    async def held_by(self, pid: int) -> Bytes | None:
        return Bytes(0)
