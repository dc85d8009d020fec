"""What a probe says of one NVIDIA card, and the same card as the planner wants it. Pure.

Anything may be unknown: drivers answer some questions on some cards only. Does not know how it was asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from freetoken.core.units import Bytes
from freetoken.plan.hardware import ASSUMED_FLOPS, ASSUMED_LINK, ASSUMED_VRAM_RATE, LINK_EFFICIENCY, Gpu, GpuProcess

# Bytes/s of one lane and direction after line coding; PCI Express base specification, 1.0 to 6.0.
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
VRAM_EFFICIENCY = 0.85  # of clock x width, what a kernel that only reads reaches
# bf16 operations of the tensor cores with f32 sums, for each CUDA core and clock: NVIDIA's architecture papers.
TENSOR_OPS = {(8, 0): 32, (8, 6): 4, (8, 7): 4, (8, 9): 4, (9, 0): 32, (10, 0): 64, (10, 3): 64, (12, 0): 4}
TENSOR_EFFICIENCY = 0.7  # of that, assumed until measured


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has memory of the card. On Windows the driver does not say how much."""

    pid: int
    name: str | None = None
    bytes: Bytes | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """The PCIe link: now, what card and slot can do together, and what the card alone could."""

    generation: int | None = None
    width: int | None = None  # lanes
    max_generation: int | None = None
    max_width: int | None = None
    card_generation: int | None = None

    @property
    def bytes_s(self) -> int | None:
        """Of the best generation, which an idle card leaves to save power, and the lanes that are connected."""
        lane, width = LANE.get(self.max_generation or self.generation or 0), self.width or self.max_width
        return int(lane * width * LINK_EFFICIENCY) if lane and width else None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Highest clocks and what they drive."""

    memory_mhz: int | None = None
    memory_bits: int | None = None
    sm_mhz: int | None = None
    cores: int | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """One card. `problem` says why it does not answer at all (a lost card); `silent` maps questions to refusals."""

    uuid: str
    name: str | None = None
    compute_capability: tuple[int, int] | None = None
    vram_total: Bytes | None = None
    vram_free: Bytes | None = None
    holders: tuple[Holder, ...] = ()
    link: Link = Link()
    clocks: Clocks = Clocks()
    display: bool | None = None
    temperature_c: int | None = None
    utilisation: int | None = None  # percent
    problem: str | None = None
    silent: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name, with enough of the uuid to tell twins apart."""
        return f"{self.name or 'a card'} ({self.uuid[:12]})"


def as_gpu(card: Card) -> Gpu | None:
    """The card for the planner; None where its memory is not known. Rates that are not known stay assumed."""
    if card.problem or card.vram_total is None or card.vram_free is None:
        return None
    return Gpu(
        uuid=card.uuid,
        name=card.name or card.uuid,
        vram_total=card.vram_total,
        vram_free=card.vram_free,
        link_bytes_s=card.link.bytes_s or ASSUMED_LINK,
        memory_bytes_s=_memory_rate(card.clocks) or ASSUMED_VRAM_RATE,
        flops=_flops(card) or ASSUMED_FLOPS,
        compute_capability=card.compute_capability,
        display=bool(card.display),
        holders=tuple(
            GpuProcess(holder.pid, holder.name or "a program", holder.bytes)
            for holder in card.holders
            if holder.bytes is not None
        ),
    )


def _memory_rate(clocks: Clocks) -> int | None:
    """Two transfers a clock."""
    if not clocks.memory_mhz or not clocks.memory_bits:
        return None
    return int(2 * clocks.memory_mhz * 1e6 * clocks.memory_bits / 8 * VRAM_EFFICIENCY)


def _flops(card: Card) -> int | None:
    ops = TENSOR_OPS.get(card.compute_capability) if card.compute_capability else None
    if not ops or not card.clocks.cores or not card.clocks.sm_mhz:
        return None
    return int(ops * card.clocks.cores * card.clocks.sm_mhz * 1e6 * TENSOR_EFFICIENCY)
