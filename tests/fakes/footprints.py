"""Models and machines from plain numbers, so that a report's figures can be planned as they were given. Pure.

Does not know what a model computes: the sizes are whatever a test says they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from freetoken.core.units import Bytes
from freetoken.plan.choices import Requested
from freetoken.plan.footprint import Experts, Footprint, Part, Term, Work
from freetoken.plan.hardware import Gpu, GpuProcess, Machine
from freetoken.plan.ledger import Plan
from freetoken.plan.placement import plan_footprints

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
RESERVE = 256 * MIB
"""What a plan never spends on a card without a display."""
FIRST_GPU = "GPU-0"


def gib(number: float) -> int:
    """`number` GiB in whole bytes, as a report rounds them."""
    return int(number * GIB)


def model(
    fixed: int,
    *,
    per_request: int = 0,
    workspace: int = 0,
    page_bytes: int = 20_480,
    page_size: int = 1,
    window: int = 262_144,
    experts: Experts | None = None,
    prefill: Sequence[Part] = (),
    host: Sequence[Term] = (),
    terms: Sequence[Term] = (),
    work: Work | None = None,
) -> Footprint:
    """A model whose weights are `fixed` bytes and whose other sizes are as given; every other line is nothing."""
    known = (
        Term("weights", fixed),
        Term("state", 0, per_request, detail="recurrent and window state"),
        Term("attention_workspace", workspace),
        *terms,
    )
    return Footprint(
        terms=tuple(term for term in known if term.fixed or term.per_request),
        page_size=page_size,
        page_bytes=page_bytes,
        window=window,
        work=work or Work(read_bytes=2_000_000_000, params=3_000_000_000, layers=40, expert_params=1_000_000_000),
        prefill=tuple(prefill),
        experts=experts,
        host=tuple(host),
    )


def moe(
    slot_bytes: int,
    *,
    layers: int,
    per_layer: int,
    top_k: int,
    minimum: int | None = None,
    bank_bytes: int | None = None,
) -> Experts:
    """Routed experts that are as large in host memory as in a slot, unless `bank_bytes` says otherwise."""
    return Experts(layers, per_layer, top_k, slot_bytes, slot_bytes if bank_bytes is None else bank_bytes, minimum)


def card(free: int, *, total: int | None = None, uuid: str = FIRST_GPU, display: bool = False) -> Gpu:
    """A card with `free` bytes, and nothing else on it unless `total` says so."""
    return Gpu(uuid, uuid, Bytes(total or free), Bytes(free), display=display)


def machine(
    *gpus: Gpu, ram: int = 256 * GIB, pin_limit: int | None = None, holders: Sequence[GpuProcess] = ()
) -> Machine:
    """A computer with `ram` bytes free; `holders` are programs on its first card."""
    if holders:
        gpus = (replace(gpus[0], holders=tuple(holders)), *gpus[1:])
    return Machine(Bytes(ram), Bytes(ram), 8, gpus, None if pin_limit is None else Bytes(pin_limit))


def plan(footprint: Footprint, requested: Requested, where: Machine) -> Plan:
    """The plan of a model that is kept in one weight dtype only."""
    return plan_footprints({"bfloat16": footprint}, requested, where)


def on_card(footprint: Footprint, requested: Requested, free: int) -> Plan:
    """The plan on one card with `free` bytes in a computer with plenty of memory."""
    return plan(footprint, requested, machine(card(free)))


def line(found: Plan, name: str) -> int:
    """Bytes of the ledger line `name`; 0 where the plan has none."""
    return sum(line.bytes for line in found.ledger if line.line == name)
