"""How long a reference turn takes with a given division of the memory: what the planner minimises. Pure.

Symbols: L routed layers of E experts, k of them for a token, b bytes of one expert, f the part of all experts that is
in VRAM, h the hit rate that goes with it. These are limits of the hardware, never promises: good engines reach 60 to 70
% of the decode figure. Does not know budgets, nor what was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from freetoken.plan.choices import Backend
from freetoken.plan.footprint import Experts, Footprint
from freetoken.plan.hardware import ASSUMED_CORE_FLOPS, Gpu, Machine

PROMPT = 8_000  # new tokens of the reference turn
OUTPUT = 400
OVERHEAD_S = 45e-6  # of one layer in a decode step: launches, look-up, admission
UNSTAGED = 1.25  # experts fetched one by one instead of a layer at a time; an assumption
HIT_CURVE = ((0.0, 0.0), (0.06, 0.32), (0.125, 0.645), (0.25, 0.80), (0.46, 0.90), (0.59, 0.935), (1.0, 1.0))
"""(part of the experts in VRAM, hit rate) of chat and agent text at one request: the middles of what users of several
engines report, made concave, so that a slot more never earns more than the slot before it."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes and operations a second of what computes."""

    memory: int  # where dense weights are read
    flops: int  # of prefill
    link: int  # host to device
    cpu_memory: int  # experts on the CPU, decode
    cpu_flops: int


def rates_of(machine: Machine, gpu: Gpu | None) -> Rates:
    """Those of `gpu`, or of the CPU alone."""
    cpu = machine.cores * ASSUMED_CORE_FLOPS
    if gpu is None:
        return Rates(machine.ram_bytes_s, cpu, machine.ram_bytes_s, machine.ram_bytes_s, cpu)
    # nothing that the host sends or computes is faster than the card itself
    link, ram = (min(rate, gpu.memory_bytes_s) for rate in (gpu.link_bytes_s, machine.ram_bytes_s))
    return Rates(gpu.memory_bytes_s, gpu.flops, link, ram, min(cpu, gpu.flops))


def hit_rate(part: float) -> float:
    """h for f = `part` of the experts in VRAM: linear between the points of HIT_CURVE."""
    for (left, low), (right, high) in pairwise(HIT_CURVE):
        if part <= right:
            return low + (high - low) * (part - left) / (right - left)
    return 1.0


def unique(experts: Experts, tokens: int) -> float:
    """Experts of one layer that `tokens` tokens route to, were they independent: E (1 - (1 - k/E)^n)."""
    return float(experts.per_layer * (1 - (1 - experts.top_k / experts.per_layer) ** tokens))


@dataclass(frozen=True, slots=True)
class Speed:
    """Times of one model on one device, in seconds."""

    model: Footprint
    rates: Rates

    def decode_s(self, part: float, backend: Backend) -> float:
        """One token behind PROMPT cached ones, with `part` of the experts in VRAM."""
        work, experts, rates = self.model.work, self.model.experts, self.rates
        dense = work.read_bytes + min(PROMPT, self.model.window) * self.model.token_bytes
        if experts is None:
            return dense / rates.memory + work.layers * OVERHEAD_S
        hit = hit_rate(part)
        routed = experts.layers * experts.top_k * experts.slot_bytes
        misses = rates.cpu_memory if backend == "cpu" else rates.link
        return (dense + hit * routed) / rates.memory + (1 - hit) * routed / misses + work.layers * OVERHEAD_S

    def prefill_s(self, chunk: int, staging: int, part: float, backend: Backend) -> float:
        """PROMPT tokens in chunks of `chunk`."""
        whole, rest = divmod(PROMPT, chunk)
        last = self._chunk_s(rest, staging, part, backend) if rest else 0.0
        return whole * self._chunk_s(chunk, staging, part, backend) + last

    def turn_s(self, chunk: int, staging: int, part: float, backend: Backend) -> float:
        """The reference turn: PROMPT tokens in, OUTPUT out."""
        return self.prefill_s(chunk, staging, part, backend) + OUTPUT * self.decode_s(part, backend)

    def _chunk_s(self, tokens: int, staging: int, part: float, backend: Backend) -> float:
        work, experts, rates = self.model.work, self.model.experts, self.rates
        if experts is None:
            return max(work.read_bytes / rates.memory, 2 * work.params * tokens / rates.flops)
        swept = experts.layers * unique(experts, tokens) * experts.slot_bytes * (1 - part)
        if backend == "cpu":
            there = work.expert_params * (1 - part)  # active parameters that the CPU computes
            here = 2 * (work.params - there) * tokens / rates.flops
            return here + max(swept / rates.cpu_memory, 2 * there * tokens / rates.cpu_flops)
        compute, stream = 2 * work.params * tokens / rates.flops, swept / rates.link
        if staging == 2:
            return max(compute, stream) + stream / experts.layers  # the first layer's fill is not hidden
        return compute + stream * (1.0 if staging == 1 else UNSTAGED)
