"""Divide one device's memory among weights, context, experts and one step's scratch: the search. Pure.

A Division is what can still be chosen; a Problem knows what each costs and what was asked for. `solve` takes, of all
divisions that fit, the one whose reference turn is shortest; how much context is worth is decided first, because a
shorter context is not a faster turn but a worse product. Does not say why something does not fit (diagnosis.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from freetoken.core.units import Bytes
from freetoken.plan.choices import Backend, Requested
from freetoken.plan.cost import HIT_CURVE, Speed, rates_of
from freetoken.plan.footprint import Experts, Footprint
from freetoken.plan.hardware import HOST_RESERVE, Gpu, Machine

MEMORY_RATIO = 0.95
RESERVE = Bytes(256 << 20)
DISPLAY_RESERVE = Bytes(512 << 20)
RUNNING = (4, 2, 1)  # the default, and what is tried where it does not fit
CONTEXT = 32_768  # tokens for each running request, by default
MIN_CONTEXT = 2_048  # a default plan that leaves less is refused: an agent's first prompt would not fit
USUAL_CHUNK = 2_048  # a prefill chunk whose scratch comes before more context
WORTH = 0.15  # part of the decode speed that default context may cost
FRAGMENTS = 8  # of the scratch, one part in so many is lost between its pieces
BACKENDS: tuple[Backend, ...] = ("resident", "offload", "cpu")
NO_EXPERTS = Experts(0, 1, 1, 0, 0)


@dataclass(frozen=True, slots=True)
class Division:
    running: int
    pages: int  # without the dummy page
    chunk: int
    staging: int
    slots: int
    backend: Backend


@dataclass(frozen=True)
class Problem:
    """One model on one device, and what was asked for. `gpu` None: the CPU and the host's memory."""

    model: Footprint
    requested: Requested
    machine: Machine
    gpu: Gpu | None

    # ── what there is ───────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def free(self) -> int:
        return self.gpu.vram_free if self.gpu else self.machine.ram_free

    @property
    def reserve(self) -> int:
        return DISPLAY_RESERVE if self.gpu and self.gpu.display else RESERVE

    @property
    def ratio(self) -> float:
        return self.requested.memory_ratio or MEMORY_RATIO

    @cached_property
    def budget(self) -> int:
        limits = [int(self.ratio * self.free), self.free - self.reserve]
        if self.requested.vram_limit is not None:
            limits.append(self.requested.vram_limit)
        return max(0, min(limits))

    @property
    def host_budget(self) -> int:
        return max(0, self.machine.ram_free - HOST_RESERVE)

    # ── what was asked for ──────────────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def experts(self) -> Experts:
        return self.model.experts or NO_EXPERTS

    @cached_property
    def window(self) -> int:
        asked = self.requested.max_seq_len
        return min(asked, self.model.window) if asked else self.model.window

    @cached_property
    def asked_pages(self) -> int | None:
        """The KV pool as a requirement; None where it is open."""
        asked = self.requested
        if asked.num_tokens is None and asked.num_pages is None:
            return None
        tokens = max(asked.num_tokens or 0, asked.kv_reserve_tokens or 0)
        return max(self.model.pages(tokens), asked.num_pages or 0)

    @cached_property
    def least_pages(self) -> int:
        if self.asked_pages is not None:
            return self.asked_pages
        return self.model.pages(self.requested.kv_reserve_tokens or min(MIN_CONTEXT, self.window))

    @cached_property
    def asked_slots(self) -> int | None:
        asked, count = self.requested, self.experts.count
        if asked.moe_cache_size is None and asked.moe_cache_rate is None:
            return None
        return min(count, max(asked.moe_cache_size or 0, ceil((asked.moe_cache_rate or 0.0) * count)))

    @property
    def asked_backends(self) -> tuple[Backend, ...]:
        asked = self.requested.moe_backend
        if not self.experts.count:
            return ("resident",)
        return BACKENDS if asked is None or asked == "auto" else (asked,)

    @cached_property
    def backends(self) -> tuple[Backend, ...]:
        """Of the asked ones, those that can run with the asked slots and whose experts the host's memory holds."""
        return tuple(b for b in self.asked_backends if self.serves(b) and self.host_bytes(b) <= self.host_budget)

    def serves(self, backend: Backend, running: int | None = None) -> bool:
        """Whether `backend` can run with the slots that were asked for (any, where none were)."""
        if self.asked_slots is None or not self.experts.count:
            return True
        return self.asked_slots >= self._needed_slots(running or self.runnings[-1], backend)

    @cached_property
    def runnings(self) -> tuple[int, ...]:
        asked = self.requested.max_running_requests
        return (asked,) if asked else RUNNING

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Prefill chunks to choose from, largest first; none much longer than the window."""
        asked = self.requested.max_prefill_tokens
        if asked:
            return (asked,)
        longer = [chunk for chunk in self.model.chunks if chunk >= self.window]
        return (*longer[-1:], *(chunk for chunk in self.model.chunks if chunk < self.window))

    def least_slots(self, running: int, backend: Backend) -> int:
        needed = self._needed_slots(running, backend)
        return needed if self.asked_slots is None else max(needed, self.asked_slots)

    def _needed_slots(self, running: int, backend: Backend) -> int:
        if backend == "resident":
            return self.experts.count
        return 0 if backend == "cpu" and self.experts.minimum is None else self.experts.least(running)

    # ── what it costs ───────────────────────────────────────────────────────────────────────────────────────────────
    def effective(self, pages: int) -> int:
        """Tokens of context that one request can have."""
        return min(self.window, pages * self.model.page_size)

    def scratch(self, chunk: int, staging: int, running: int, pages: int) -> int:
        """One step's transient and its staging: a whole chunk beside a token of every running request."""
        transient = self.model.transient(chunk + running, self.effective(pages))
        return transient + staging * self.experts.layer_bytes

    def base(self, running: int, pages: int, chunk: int, staging: int) -> int:
        """Everything but expert slots."""
        scratch = self.scratch(chunk, staging, running, pages)
        return self.model.fixed(running) + (pages + 1) * self.model.page_bytes + scratch + scratch // FRAGMENTS

    def total(self, division: Division) -> int:
        base = self.base(division.running, division.pages, division.chunk, division.staging)
        return base + division.slots * self.experts.slot_bytes

    def host_bytes(self, backend: Backend) -> int:
        """Memory of the host that a plan for a GPU takes beside it."""
        if self.gpu is None:
            return 0
        runtime = sum(term.bytes(max(self.runnings[-1], 1)) for term in self.model.host)
        return runtime + (0 if backend == "resident" else self.experts.count * self.experts.bank_bytes)

    # ── the search ──────────────────────────────────────────────────────────────────────────────────────────────────
    @cached_property
    def speed(self) -> Speed:
        return Speed(self.model, rates_of(self.machine, self.gpu))

    def turn_s(self, division: Division) -> float:
        return self.speed.turn_s(division.chunk, division.staging, self.part(division.slots), division.backend)

    def part(self, slots: int) -> float:
        return slots / self.experts.count if self.experts.count else 1.0

    def least(self) -> Division:
        """The smallest division that was asked for, whether or not it fits."""
        running = self.runnings[-1]
        backend = min(self.backends or self.asked_backends, key=lambda name: self.least_slots(running, name))
        slots = self.least_slots(running, backend)
        return Division(running, self.least_pages, self.chunks[-1], 0, slots, backend)

    def fits(self, division: Division) -> bool:
        return self.total(division) <= self.budget and self.host_bytes(division.backend) <= self.host_budget

    def feasible(self) -> bool:
        """Whether `solve` finds anything."""
        return bool(self.backends) and self.fits(self.least())

    def solve(self) -> Division | None:
        """The best division that fits: the longest context, then the most running requests, then the shortest turn."""
        best: Division | None = None
        for running in self.runnings:
            found = self._divide(running)
            if found and (best is None or self.effective(found.pages) > self.effective(best.pages)):
                best = found
            if best and self.effective(best.pages) == self.window:
                break
        return best

    def _divide(self, running: int) -> Division | None:
        pages = self._pages(running)
        found = list(self._divisions(running, pages))
        return min(found, key=self.turn_s) if found else None

    def _divisions(self, running: int, pages: int) -> Iterator[Division]:
        """Those that fit, each with as many slots as fit beside it."""
        for backend in (backend for backend in self.backends if self.serves(backend, running)):
            for chunk in self.chunks:
                for staging in (2, 1, 0) if backend == "offload" else (0,):
                    slots = self._slots(self.budget - self.base(running, pages, chunk, staging), running, backend)
                    if slots is not None:
                        yield Division(running, pages, chunk, staging, slots, backend)

    def _slots(self, room: int, running: int, backend: Backend) -> int | None:
        """Slots in `room` bytes; None where they are too few."""
        least, each = self.least_slots(running, backend), self.experts.slot_bytes
        if room < least * each:
            return None
        if self.asked_slots is not None or not each:
            return least
        return min(self.experts.count, room // each)

    # ── how much context ────────────────────────────────────────────────────────────────────────────────────────────
    def _pages(self, running: int) -> int:
        """The KV pool: as asked, or the default that is worth its price.

        More memory never gives less: each size has a threshold in bytes, above which it is affordable, and the largest
        affordable one is taken. It grows past the least only once prefill has the scratch of a usual chunk.
        """
        least = self.least_pages
        if self.asked_pages is not None or not self.backends:
            return least
        wanted = max(least, self.model.pages(min(CONTEXT, self.window) * running))
        whole = max(wanted, self.model.pages(self.window))
        if not self.experts.count:
            return self._largest(
                least, self._ceiling(wanted, whole), lambda n: self._affordable(running, n, "resident")
            )
        lean: Backend = "offload" if "offload" in self.backends else "cpu"
        judges = [backend for backend in ("resident", lean) if backend in self.backends]
        sizes = [n for n in self._ladder(least, wanted, whole) if any(self._affordable(running, n, b) for b in judges)]
        return max(sizes, default=least)

    def _affordable(self, running: int, pages: int, backend: Backend) -> bool:
        """Whether a pool of `pages` fits beside a usual chunk's scratch and is worth its price in slots."""
        slots = self.least_slots(running, backend) * self.experts.slot_bytes
        chunk = next((chunk for chunk in self.chunks if chunk <= USUAL_CHUNK), self.chunks[-1])
        staging = int(backend == "offload")
        smallest = self.base(running, self.least_pages, chunk, staging)
        more = self.base(running, pages, chunk, staging) - smallest
        room = self.budget - smallest
        if backend == "resident" or self.asked_slots is not None:
            return more + slots <= room
        return self._worth(more, slots, room, backend)

    def _ceiling(self, wanted: int, whole: int) -> int:
        """The most pages a default takes where context costs no speed. On a CPU the pool is everybody's memory."""
        if self.gpu is None and whole * self.model.page_bytes > WORTH * self.budget:
            return wanted
        return whole

    @staticmethod
    def _largest(low: int, high: int, holds: Callable[[int], bool]) -> int:
        """The largest number in low..high that `holds`, which is true up to some number; `low` where none does."""
        if holds(high):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    def largest_pages(self, division: Division) -> int:
        """The largest KV pool beside the rest of `division`; 0 where even that does not fit."""
        rest = division.slots * self.experts.slot_bytes

        def fits(pages: int) -> bool:
            return self.base(division.running, pages, division.chunk, division.staging) + rest <= self.budget

        return self._largest(0, division.pages, fits) if fits(0) else 0

    def _ladder(self, least: int, wanted: int, whole: int) -> list[int]:
        """Sizes of the pool to choose from, in pages."""
        tokens = MIN_CONTEXT
        sizes = {least, wanted, whole}
        while (pages := self.model.pages(tokens)) < wanted:
            sizes.add(pages)
            tokens *= 2
        return sorted(size for size in sizes if size >= least)

    def _worth(self, more: int, least: int, room: int, backend: Backend) -> bool:
        """Whether `more` bytes of context are worth their price in `room` bytes, or would be in less.

        They are where they leave `least` bytes of slots and cost at most WORTH of the decode speed. With x the room,
        t(x - more) * (1 - WORTH) <= t(x); t is linear between the points of the hit curve, so the difference is too,
        and where it is not above zero anywhere up to `room`, it is not at an end of one of its pieces.
        """
        everything = self.experts.count * self.experts.slot_bytes

        def loss(x: float) -> float:
            with_context = self.speed.decode_s(min(1.0, (x - more) / everything), backend)
            return with_context * (1 - WORTH) - self.speed.decode_s(min(1.0, x / everything), backend)

        first = more + least
        if room < first:
            return False
        knots = (part * everything + base for part, _ in HIT_CURVE for base in (0, more))
        return any(loss(x) <= 0 for x in (room, first, *(knot for knot in knots if first < knot < room)))
