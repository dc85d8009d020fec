"""A snapshot of this machine as the planner sees it. Pure data, and one function that reads it.

Rates are bytes or operations a second that a good kernel reaches, not the data sheet's peaks: measured where somebody
measured, assumed otherwise. Does not probe GPUs (daemon/watch does, in a child) and never adds two devices up.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.units import Bytes

LINK_EFFICIENCY = 0.85  # of generation x width, until measured
# Of a machine that is only described: PCIe 4.0 x16, the memory of a mid-range card, its bf16 tensor rate.
ASSUMED_LINK = int(31.5e9 * LINK_EFFICIENCY)
ASSUMED_VRAM_RATE = 400_000_000_000
ASSUMED_FLOPS = 60_000_000_000_000
ASSUMED_RAM_RATE = 20_000_000_000
ASSUMED_CORE_FLOPS = 25_000_000_000  # of one core, f32
HOST_RESERVE = Bytes(256 << 20)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A program that holds memory of a GPU."""

    pid: int
    name: str
    bytes: Bytes


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. `vram_free` is what a new process may take; rates in bytes/s and operations/s."""

    uuid: str
    name: str
    vram_total: Bytes
    vram_free: Bytes
    link_bytes_s: int = ASSUMED_LINK
    memory_bytes_s: int = ASSUMED_VRAM_RATE
    flops: int = ASSUMED_FLOPS
    compute_capability: tuple[int, int] | None = None
    display: bool = False
    holders: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """`ram_free` is what a new process may take without swapping; `pin_limit` the most that can be page-locked."""

    ram_total: Bytes
    ram_free: Bytes
    cores: int  # physical, at least 1
    gpus: tuple[Gpu, ...] = ()
    pin_limit: Bytes | None = None  # None: not known to be limited
    ram_bytes_s: int = ASSUMED_RAM_RATE


def snapshot(memory_limit: int | None = None) -> Machine:
    """Reads total and available memory and the physical cores this process may use.

    `memory_limit` is a container's limit in bytes, which the system's own figures leave out.
    """
    import psutil

    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    if memory_limit is not None and memory_limit < total:
        total, free = memory_limit, min(free, memory_limit - psutil.Process().memory_info().rss)
    physical = psutil.cpu_count(logical=False) or 1
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else physical
    return Machine(Bytes(total), Bytes(max(0, free)), max(1, min(physical, allowed)))


def described(vram: Bytes | None, ram: Bytes | None, base: Machine) -> Machine:
    """The machine that --vram and --ram describe; what they leave open is `base`'s. `vram` means free bytes."""
    gpus = base.gpus
    if vram is not None:
        gpus = (Gpu("GPU-described", f"a card with {vram} free", vram_total=vram, vram_free=vram),)
    total, free = (ram, ram) if ram is not None else (base.ram_total, base.ram_free)
    return Machine(total, free, base.cores, gpus, base.pin_limit, base.ram_bytes_s)
