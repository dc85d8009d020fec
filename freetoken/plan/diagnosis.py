"""Why a model does not fit, in which words, with which numbers. Pure.

Verdicts are tried in a fixed order and the first that matches is given, so that the same situation always has the same
name. What can be done about it is found by fixes.py, which plans each change again before it is offered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from freetoken.core.errors import (
    CannotEstimate,
    ExpertCacheTooLarge,
    FixedPartDoesNotFit,
    HostRamTooSmall,
    KvTooLarge,
    Number,
    OtherProcessesHoldMemory,
    PlanError,
    PrefillDoesNotFit,
    RatioTooHigh,
    RatioTooLow,
    WeightsDoNotFit,
)
from freetoken.core.units import Bytes
from freetoken.plan.choices import Requested
from freetoken.plan.division import FRAGMENTS, Problem
from freetoken.plan.fixes import HIGHEST_RATIO, LEAST_CONTEXT, Case, find_fixes
from freetoken.plan.ledger import Diagnosis, Fix

_CONTEXT = ("num_tokens", "num_pages", "kv_reserve_tokens")
_Found = tuple[type[PlanError], str, dict[str, Number]]


def diagnose(case: Case, requested: Requested) -> Diagnosis:
    """What is wrong with a request that no division satisfies."""
    problem = case.problem(requested)
    error, detail, numbers = next(found for test in _TESTS if (found := test(case, problem)) is not None)
    fixes = () if error is CannotEstimate else find_fixes(case, requested)
    return Diagnosis(error.code, detail, _sums(problem) | numbers, fixes)


def after_peak(case: Case, requested: Requested, peak: Bytes) -> Diagnosis | None:
    """What a measured peak says: None where it stayed within the budget. The remedy is a lower ratio, never a higher.

    `peak` is the most that the engine held, everything included.
    """
    problem = case.problem(requested)
    over = peak - problem.budget
    if over <= 0:
        return None
    ratio = int((problem.budget - over) / max(1, problem.free) * 100) / 100
    lower = replace(requested, memory_ratio=ratio)
    division = case.problem(lower).solve() if ratio > 0 else None
    fixes: tuple[Fix, ...] = ()
    if division is not None:
        total = Bytes(case.problem(lower).total(division))
        title, price = f"use {ratio:.0%} of the free memory", "fewer experts in VRAM or less context"
        fixes = (Fix("memory_ratio", title, {"memory_ratio": ratio}, Bytes(over), price, total),)
    detail = f"The engine held {peak} where {Bytes(problem.budget)} were planned: {Bytes(over)} too much"
    numbers: dict[str, Number] = {"peak_bytes": int(peak), "over_bytes": int(over), "budget_bytes": problem.budget}
    return Diagnosis(RatioTooHigh.code, detail, numbers, fixes)


# ── the tests, in order ─────────────────────────────────────────────────────────────────────────────────────────────
def _unknown(case: Case, problem: Problem) -> _Found | None:
    if not problem.model.unknown:
        return None
    names = ", ".join(problem.model.unknown)
    return CannotEstimate, f"The memory that this model needs is not known: {names}", {}


def _host(case: Case, problem: Problem) -> _Found | None:
    """The experts' banks do not fit the host; on a CPU, what is needed in any case does not."""
    if problem.gpu is None:
        needed = problem.model.fixed(problem.runnings[-1])
        if needed <= problem.budget:
            return None
        detail = f"The model needs {Bytes(needed)} of memory before any context; {_allowed(problem)}"
        return HostRamTooSmall, detail, {"needed_bytes": needed, "free_bytes": problem.free}
    usable = [backend for backend in problem.asked_backends if problem.serves(backend)]
    left_out = [backend for backend in usable if backend not in problem.backends]
    if not left_out:
        return None
    needed = problem.host_bytes(left_out[0])
    detail = (
        f"The experts need {Bytes(needed)} of the computer's memory; {Bytes(problem.machine.ram_free)} are free "
        f"and {Bytes(problem.host_budget)} of it may be used"
    )
    return HostRamTooSmall, detail, {"needed_bytes": needed, "free_bytes": problem.machine.ram_free}


def _weights(case: Case, problem: Problem) -> _Found | None:
    weights, most = problem.model.weights(), int(HIGHEST_RATIO * problem.free)
    if problem.gpu is None or weights <= most:
        return None
    detail = (
        f"The weights that stay in VRAM take {Bytes(weights)}; {Bytes(problem.free)} are free. No setting helps: "
        f"choose a smaller checkpoint. {_short(problem)}"
    )
    return WeightsDoNotFit, detail, {"weights_bytes": weights}


def _fixed(case: Case, problem: Problem) -> _Found | None:
    running = problem.runnings[-1]
    fixed = problem.model.fixed(running)
    if fixed <= problem.budget:
        return None
    largest = max(problem.model.terms, key=lambda term: (term.line != "weights", term.bytes(running)))
    growing = sum(term.per_request for term in problem.model.terms)
    scales = f", {Bytes(growing)} of it for each of {running} running requests" if growing and running > 1 else ""
    detail = (
        f"The weights and what the engine keeps beside them take {Bytes(fixed)}{scales}; {_allowed(problem)}. "
        f"The largest line beside the weights is {largest.line}. {_short(problem)}"
    )
    numbers: dict[str, Number] = {"fixed_bytes": fixed, "per_request_bytes": growing, "running": running}
    return FixedPartDoesNotFit, detail, numbers | {"line": largest.line}


def _context(case: Case, problem: Problem) -> _Found | None:
    size, division, smallest = problem.model.page_size, problem.least(), _smallest(problem)
    asked = next((name for name in _CONTEXT if _asks_for(problem, name) == division.pages), None)
    if asked is None or case.problem(smallest).feasible():
        return None
    if not case.problem(_with_least_context(smallest)).feasible():
        return None
    largest = problem.largest_pages(division)
    unit, each = ("pages", 1) if asked == "num_pages" else ("tokens", size)
    takes = Bytes((division.pages + 1) * problem.model.page_bytes)
    beside = f"{largest * each:,} is the largest that fits" if largest else "not one page fits beside the rest"
    detail = f"{_flag(asked)}: {division.pages * each:,} {unit} of context take {takes}; {beside}. {_short(problem)}"
    numbers: dict[str, Number] = {
        "flag": _flag(asked),
        "asked_tokens": division.pages * size,
        "largest_tokens": largest * size,
        "asked_pages": division.pages,
        "largest_pages": largest,
    }
    return KvTooLarge, detail, numbers


def _slots(case: Case, problem: Problem) -> _Found | None:
    named = [name for name in ("moe_cache_size", "moe_cache_rate") if getattr(problem.requested, name) is not None]
    if not named and problem.requested.moe_backend != "resident":
        return None
    smallest = _smallest(problem)
    short_chunk = replace(problem.requested, max_prefill_tokens=smallest.max_prefill_tokens)
    if not problem.experts.count or not case.problem(smallest).feasible() or case.problem(short_chunk).feasible():
        return None
    division, each = problem.least(), problem.experts.slot_bytes
    largest = max(0, (problem.budget - problem.total(replace(division, slots=0))) // each)
    flag = _flag(named[0] if named else "moe_backend")
    detail = (
        f"{flag}: {division.slots:,} expert slots of {Bytes(each)} take {Bytes(division.slots * each)}; "
        f"{largest:,} fit beside the rest. {_short(problem)}"
    )
    return ExpertCacheTooLarge, detail, {"asked_slots": division.slots, "largest_slots": largest, "flag": flag}


def _prefill(case: Case, problem: Problem) -> _Found | None:
    division = problem.least()
    running, pages, chunk = division.running, division.pages, division.chunk
    scratch = problem.scratch(chunk, 0, running, pages)
    scratch += scratch // FRAGMENTS
    if problem.total(division) - scratch > problem.budget:
        return None
    context = problem.effective(pages)
    parts = sorted(problem.model.prefill, key=lambda part: -part.bytes(chunk, context))[:3]
    named = ", ".join(f"{part.name} {Bytes(part.bytes(chunk, context))}" for part in parts)
    detail = f"Prefill of {chunk:,} tokens at a time needs {Bytes(scratch)} of scratch ({named}). {_short(problem)}"
    return PrefillDoesNotFit, detail, {"chunk_tokens": chunk, "transient_bytes": scratch}


def _ratio(case: Case, problem: Problem) -> _Found | None:
    total = problem.total(problem.least())
    ratio = ceil(total / max(1, problem.free) * 100) / 100
    if ratio > HIGHEST_RATIO or not case.problem(replace(problem.requested, memory_ratio=ratio)).feasible():
        return None
    detail = f"At a memory ratio of {problem.ratio:g} {Bytes(problem.budget)} may be used; it fits from {ratio:g} on"
    return RatioTooLow, detail, {"ratio": problem.ratio, "fits_at": ratio}


def _others(case: Case, problem: Problem) -> _Found | None:
    gpu = problem.gpu
    if gpu is None:
        return None
    empty = replace(case, gpu=replace(gpu, vram_free=gpu.vram_total))
    if not empty.problem(problem.requested).feasible():
        return None
    held = gpu.vram_total - gpu.vram_free
    who = ", ".join(f"{holder.name} (pid {holder.pid}, {holder.bytes})" for holder in gpu.holders) or "other programs"
    detail = f"{Bytes(held)} of {gpu.vram_total} are held by {who}. {_short(problem)}"
    return OtherProcessesHoldMemory, detail, {"held_bytes": held}


def _minimum(case: Case, problem: Problem) -> _Found:
    """What is left: the fixed part fits, the least context, slots and scratch do not fit beside it."""
    division = problem.least()
    error = FixedPartDoesNotFit if problem.gpu else HostRamTooSmall
    detail = (
        f"The smallest plan ({division.pages * problem.model.page_size:,} tokens of context"
        + (f", {division.slots} expert slots" if problem.experts.count else "")
        + f") needs {Bytes(problem.total(division))}; {_allowed(problem)}. {_short(problem)}"
    )
    return error, detail, {}


_TESTS: tuple[Callable[[Case, Problem], _Found | None], ...] = (
    _unknown,
    _host,
    _weights,
    _fixed,
    _context,
    _slots,
    _prefill,
    _ratio,
    _others,
    _minimum,
)


# ── parts of sentences ──────────────────────────────────────────────────────────────────────────────────────────────
def _sums(problem: Problem) -> dict[str, Number]:
    total = problem.total(problem.least())
    return {
        "free_bytes": problem.free,
        "budget_bytes": problem.budget,
        "total_bytes": total,
        "shortfall_bytes": max(0, total - problem.budget),
    }


def _allowed(problem: Problem) -> str:
    limited = problem.requested.vram_limit is not None and problem.budget == problem.requested.vram_limit
    why = "the limit that was set" if limited else f"{problem.ratio:.0%} of {Bytes(problem.free)} free"
    return f"{Bytes(problem.budget)} may be used ({why})"


def _short(problem: Problem) -> str:
    division = problem.least()
    short = problem.total(division) - problem.budget
    return f"The smallest plan is {Bytes(short)} short of what may be used" if short > 0 else "Too little may be used"


def _smallest(problem: Problem) -> Requested:
    """The request without what it says of slots and chunk."""
    backend = None if problem.requested.moe_backend == "resident" else problem.requested.moe_backend
    chunk = min(problem.chunks[-1], problem.model.chunks[-1])
    changes = {"moe_cache_size": None, "moe_cache_rate": None, "moe_backend": backend, "max_prefill_tokens": chunk}
    return replace(problem.requested, **changes)  # type: ignore[arg-type]


def _with_least_context(requested: Requested) -> Requested:
    return replace(requested, num_tokens=None, num_pages=None, kv_reserve_tokens=LEAST_CONTEXT)


def _asks_for(problem: Problem, name: str) -> int | None:
    """Pages that the option `name` asks for; the pool is the largest of them."""
    value = getattr(problem.requested, name)
    return value if value is None or name == "num_pages" else problem.model.pages(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
