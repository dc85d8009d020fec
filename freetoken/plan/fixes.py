"""What can be changed so that a refused model fits: found by planning each change again. Pure.

An option has values from the mildest to the most permissive. Changes are tried one, two and three at a time with the
most permissive values; of the smallest sets that fit, each value is then made as mild as still fits. Nothing is offered
that was not planned. Does not know verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, floor
from typing import Any

from freetoken.core.errors import SettingError
from freetoken.core.units import Bytes
from freetoken.plan.choices import Requested, Value
from freetoken.plan.division import MIN_CONTEXT, Problem
from freetoken.plan.footprint import Footprint
from freetoken.plan.hardware import Gpu, Machine
from freetoken.plan.ledger import Fix

HIGHEST_RATIO = 0.98
LEAST_CONTEXT = 1_024  # tokens; less is not offered
_MOST_FIXES = 3
_MOST_CHANGES = 3
_SLOTS = ("moe_cache_size", "moe_cache_rate")

Changes = Mapping[str, Value | None]


@dataclass(frozen=True, slots=True)
class Case:
    """A model on one device of a machine, by weight dtype, the default first."""

    footprints: Mapping[str, Footprint]
    machine: Machine
    gpu: Gpu | None

    def dtype(self, requested: Requested) -> str:
        return requested.dtype or next(iter(self.footprints))

    def problem(self, requested: Requested) -> Problem:
        """Raises SettingError for a dtype that this model cannot be kept in."""
        dtype = self.dtype(requested)
        if dtype not in self.footprints:
            raise SettingError(f"This model cannot be kept as {dtype}: {', '.join(self.footprints)} can", param="dtype")
        return Problem(self.footprints[dtype], requested, self.machine, self.gpu)


@dataclass(frozen=True, slots=True)
class _Option:
    """One thing that can be changed. `values` are mild to permissive, worked out where the last of them is set."""

    name: str
    extreme: Changes
    values: Callable[[Problem], Sequence[Changes]]
    title: Callable[[Changes], str]
    price: str


def find_fixes(case: Case, requested: Requested) -> tuple[Fix, ...]:
    """At most three fixes of as few changes as possible; empty where no three changes help."""
    options = tuple(_options(case, requested))
    for count in range(1, _MOST_CHANGES + 1):
        sets = (chosen for chosen in combinations(options, count) if _fits(case, requested, chosen))
        found = [_milder(case, requested, chosen) for chosen in sets]
        if found:
            return tuple(found[:_MOST_FIXES]) + _others(case, requested)
    return _others(case, requested)


def _fits(case: Case, requested: Requested, chosen: Sequence[_Option]) -> bool:
    return case.problem(_with(requested, *(option.extreme for option in chosen))).feasible()


def _milder(case: Case, requested: Requested, chosen: Sequence[_Option]) -> Fix:
    """The fix of `chosen`, each value as mild as fits beside the others."""
    values = {option.name: option.extreme for option in chosen}
    for option in chosen:
        problem = case.problem(_with(requested, *values.values()))
        for value in option.values(problem):
            tried = values | {option.name: value}
            if case.problem(_with(requested, *tried.values())).feasible():
                values = tried
                break
    changes = {name: value for change in values.values() for name, value in change.items()}
    return _fix(
        case,
        requested,
        changes,
        title=" and ".join(option.title(values[option.name]) for option in chosen),
        price="; ".join(dict.fromkeys(option.price for option in chosen)),
    )


def _fix(case: Case, requested: Requested, changes: Changes, *, title: str, price: str) -> Fix:
    before, problem = case.problem(requested), case.problem(_with(requested, changes))
    division = problem.solve()
    if division is None:
        raise RuntimeError(f"{dict(changes)} was found to fit and cannot be planned")
    effect = Bytes(_gap(before) - _gap(problem))
    return Fix("+".join(changes), title, changes, effect, price, Bytes(problem.total(division)))


def _gap(problem: Problem) -> int:
    """Bytes that the smallest plan is over the budget; negative where it is below."""
    return problem.total(problem.least()) - problem.budget


def _others(case: Case, requested: Requested) -> tuple[Fix, ...]:
    """Ending the programs that hold memory of the card, where they are known and that is enough."""
    gpu = case.gpu
    if gpu is None or not gpu.holders:
        return ()
    held = sum(holder.bytes for holder in gpu.holders)
    freed = replace(gpu, vram_free=Bytes(min(gpu.vram_total, gpu.vram_free + held)))
    problem = Case(case.footprints, case.machine, freed).problem(requested)
    division = problem.solve()
    if division is None:
        return ()
    names = ", ".join(f"{holder.name} (pid {holder.pid}, {holder.bytes})" for holder in gpu.holders)
    return (Fix("close_programs", f"close {names}", {}, Bytes(held), "", Bytes(problem.total(division))),)


# ── the options ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _options(case: Case, requested: Requested) -> Iterator[_Option]:
    """Those that change anything, the mildest first."""
    problem = case.problem(requested)
    yield from _ratio(problem)
    yield from _limit(problem)
    yield from _running(problem)
    yield from _context(problem)
    yield from _window(problem)
    yield from _slots(problem)
    yield from _chunk(problem)
    yield from _backend(problem)
    if "bfloat16" in case.footprints and case.dtype(requested) == "float32":
        yield _fixed("dtype", "bfloat16", "keep the weights as bfloat16", "slightly less exact")


def _fixed(name: str, value: Value | None, title: str, price: str) -> _Option:
    change = {name: value}
    return _Option(name, change, lambda _: (change,), lambda _: title, price)


def _ratio(problem: Problem) -> Iterator[_Option]:
    if problem.ratio >= HIGHEST_RATIO:
        return

    def values(at: Problem) -> Sequence[Changes]:
        enough = ceil(at.total(at.least()) / max(1, at.free) * 100) / 100
        return [{"memory_ratio": max(problem.ratio, enough)}]

    yield _Option(
        "memory_ratio",
        {"memory_ratio": HIGHEST_RATIO},
        values,
        lambda change: f"use {change['memory_ratio']:.0%} of the free memory",
        "less is left for other programs",
    )


def _limit(problem: Problem) -> Iterator[_Option]:
    asked, most = problem.requested.vram_limit, int(problem.ratio * problem.free)
    if asked is None or asked >= most:
        return
    yield _Option(
        "vram_limit",
        {"vram_limit": None},
        lambda changed: [{"vram_limit": -(-changed.total(changed.least()) >> 20) << 20}],
        lambda change: f"allow {Bytes(int(change['vram_limit'] or most))} of VRAM",
        "more VRAM is used",
    )


def _running(problem: Problem) -> Iterator[_Option]:
    asked = problem.requested.max_running_requests
    if asked is None or asked == 1:
        return
    fewer = [number for number in (asked * 3 // 4, asked // 2, asked // 4, 2, 1) if 0 < number < asked]
    yield _Option(
        "max_running_requests",
        {"max_running_requests": 1},
        lambda _: [{"max_running_requests": number} for number in sorted(set(fewer), reverse=True)],
        lambda change: f"compute {change['max_running_requests']} at a time instead of {asked}",
        "further requests wait",
    )


def _context(problem: Problem) -> Iterator[_Option]:
    """A smaller pool, named by the options that were given; a smaller least where none was."""
    size, asked = problem.model.page_size, problem.requested
    given = [name for name in ("num_tokens", "num_pages", "kv_reserve_tokens") if getattr(asked, name) is not None]
    least = problem.model.pages(min(LEAST_CONTEXT, problem.window))
    if problem.least_pages <= least:
        return

    def changed(pages: int) -> Changes:
        return {name: pages if name == "num_pages" else pages * size for name in given or ["kv_reserve_tokens"]}

    def values(at: Problem) -> Sequence[Changes]:
        most = replace(at.least(), pages=problem.least_pages)
        return [changed(pages) for pages in (at.largest_pages(most),) if pages >= least]

    explicit = problem.asked_pages is not None
    yield _Option(
        "context",
        changed(least),
        values if explicit else lambda _: [changed(pages) for pages in _halves(problem.least_pages, least)],
        lambda change: _context_title(change, size),
        "shorter context",
    )


def _context_title(change: Changes, size: int) -> str:
    tokens = change.get("num_tokens") or change.get("kv_reserve_tokens") or int(change["num_pages"] or 0) * size
    return f"keep room for {tokens:,} tokens of context"


def _halves(pages: int, least: int) -> list[int]:
    found = []
    while pages > least:
        pages = max(least, pages // 2)
        found.append(pages)
    return found


def _window(problem: Problem) -> Iterator[_Option]:
    """A shorter window, where scratch grows with it."""
    grows = any(part.per_context or part.per_token_context for part in problem.model.prefill)
    now = problem.effective(problem.least_pages)
    if not grows or now <= LEAST_CONTEXT:
        return
    windows = [tokens for tokens in (32_768, 16_384, 8_192, 4_096, MIN_CONTEXT, LEAST_CONTEXT) if tokens < now]
    yield _Option(
        "max_seq_len",
        {"max_seq_len": LEAST_CONTEXT},
        lambda _: [{"max_seq_len": window} for window in windows],
        lambda change: f"take at most {change['max_seq_len']:,} tokens a request",
        "shorter context",
    )


def _slots(problem: Problem) -> Iterator[_Option]:
    if problem.asked_slots is None:
        return
    experts, asked = problem.experts, problem.requested
    given = [name for name in _SLOTS if getattr(asked, name) is not None]

    def changed(slots: int) -> Changes:
        return {name: slots if name == "moe_cache_size" else floor(slots / experts.count * 1e4) / 1e4 for name in given}

    def values(at: Problem) -> Sequence[Changes]:
        division = replace(at.least(), slots=0)
        room = at.budget - at.total(division)
        return [changed(min(problem.asked_slots or 0, room // experts.slot_bytes))] if room > 0 else []

    yield _Option(
        "slots", dict.fromkeys(given), values, lambda change: _slots_title(change, experts.count), "slower decode"
    )


def _slots_title(change: Changes, experts: int) -> str:
    size, rate = change.get("moe_cache_size"), change.get("moe_cache_rate")
    if size is None and rate is None:
        return "keep as many experts in VRAM as fit"
    slots = int(size) if size is not None else ceil(float(rate or 0) * experts)
    return f"keep {slots:,} experts in VRAM"


def _chunk(problem: Problem) -> Iterator[_Option]:
    asked = problem.requested.max_prefill_tokens
    smaller = [chunk for chunk in problem.model.chunks if asked is not None and chunk < asked]
    if smaller:
        yield _Option(
            "max_prefill_tokens",
            {"max_prefill_tokens": smaller[-1]},
            lambda _: [{"max_prefill_tokens": chunk} for chunk in smaller],
            lambda change: f"prefill {change['max_prefill_tokens']:,} tokens at a time",
            "slower prefill",
        )


def _backend(problem: Problem) -> Iterator[_Option]:
    asked = problem.requested.moe_backend
    if problem.gpu is not None and problem.experts.count and asked not in (None, "auto"):
        yield _fixed("moe_backend", "auto", "let the plan choose where experts are computed", "slower decode")


def _with(requested: Requested, *changes: Changes) -> Requested:
    values: dict[str, Any] = {name: value for change in changes for name, value in change.items()}
    return replace(requested, **values)
