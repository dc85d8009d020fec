"""Requested and a machine in, a Plan out, with a reason for each choice. Pure.

A machine with GPUs is planned for one of them, the one where the model fits best; without, for the CPU and the host's
memory. Does not know processes, files or formats for people (report.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from freetoken.catalog.checkpoint import Checkpoint
from freetoken.core.errors import SettingError
from freetoken.core.units import Bytes
from freetoken.plan import memory
from freetoken.plan.choices import Choice, Requested, Resolved, Value
from freetoken.plan.cost import PROMPT
from freetoken.plan.diagnosis import diagnose
from freetoken.plan.division import CONTEXT, FRAGMENTS, RUNNING, Division, Problem
from freetoken.plan.fixes import Case
from freetoken.plan.footprint import LINES, Basis, Footprint, Term
from freetoken.plan.hardware import Gpu, Machine
from freetoken.plan.ledger import Context, Diagnosis, Expected, Host, LedgerLine, Plan, Price, Verdict

MAX_QUEUED = 64
QUEUE_DEADLINE_S = 600.0
PINNED_MEMORY_LIMIT = "PINNED_MEMORY_LIMIT"
CONTEXT_SHORTER = "CONTEXT_SHORTER_THAN_WINDOW"


def make_plan(
    checkpoint: Checkpoint,
    requested: Requested,
    machine: Machine,
    measured: Mapping[str, int] | None = None,
) -> Plan:
    """Decide everything that `requested` leaves open; what does not fit is a verdict, not an exception.

    `measured` holds bytes of ledger lines that an earlier load of this model on this device was seen to take. Raises
    SettingError for requests that contradict each other or the machine.
    """
    footprints = memory.footprints(checkpoint, "cuda" if machine.gpus else "cpu")
    if measured:
        footprints = {dtype: _with_measured(model, measured) for dtype, model in footprints.items()}
    return plan_footprints(footprints, requested, machine)


def plan_footprints(footprints: Mapping[str, Footprint], requested: Requested, machine: Machine) -> Plan:
    """As make_plan, of sizes by weight dtype, the default first."""
    gpus: list[Gpu | None] = [gpu for gpu in machine.gpus if requested.gpu in (None, gpu.uuid)]
    if requested.gpu is not None and not gpus:
        there = ", ".join(gpu.uuid for gpu in machine.gpus) or "none"
        raise SettingError(f"There is no GPU {requested.gpu}; this machine has {there}", param="gpu")
    devices = gpus or [None]
    return min((_plan(Case(footprints, machine, device), requested) for device in devices), key=_worse)


def _worse(plan: Plan) -> tuple[bool, float]:
    """Orders plans for several GPUs: what fits by speed, then what does not by how much is missing."""
    turn_s = plan.expected.turn_s
    return (plan.resolved is None, float(plan.shortfall) if turn_s is None else turn_s)


def _plan(case: Case, requested: Requested) -> Plan:
    problem = case.problem(requested)
    _refuse_contradictions(problem)
    division = None if problem.model.unknown else problem.solve()
    shown = division or problem.least()
    choices = _choices(case, problem, shown)
    diagnosis = diagnose(case, requested) if division is None else None
    context = _context(problem, division)
    return Plan(
        verdict=_verdict(problem, division),
        machine=case.machine,
        requested=requested,
        resolved=Resolved(**{name: choice.value for name, choice in choices.items()}) if division else None,  # type: ignore[arg-type]
        choices=choices,
        ledger=_ledger(problem, shown),
        budget=Bytes(problem.budget),
        context=context,
        expected=_expected(problem, division),
        diagnosis=diagnosis,
        notices=tuple(_notices(problem, division, context)) if division else (),
        host=_host(problem, shown),
    )


def _refuse_contradictions(problem: Problem) -> None:
    asked, experts = problem.requested, problem.experts
    if problem.gpu is None:
        for name in ("vram_limit", "gpu"):
            if getattr(asked, name) is not None:
                raise SettingError("There is no GPU here whose memory could be limited or chosen", param=name)
        if asked.moe_backend == "offload":
            raise SettingError("--moe-backend offload needs a GPU; on a CPU leave it out", param="moe_backend")
    if not experts.count or problem.asked_slots is None:
        return
    if not any(problem.serves(backend) for backend in problem.asked_backends):
        needed = experts.count if asked.moe_backend == "resident" else experts.least(problem.runnings[-1])
        raise SettingError(
            f"{problem.asked_slots:,} expert slots are too few: {asked.moe_backend} needs {needed:,}",
            numbers={"asked_slots": problem.asked_slots, "needed_slots": needed},
            param="moe_cache_size" if asked.moe_cache_size is not None else "moe_cache_rate",
        )


def _verdict(problem: Problem, division: Division | None) -> Verdict:
    if problem.model.unknown:
        return "cannot_estimate"
    if division is None:
        return "does_not_fit"
    fewer = problem.requested.max_running_requests is None and division.running < RUNNING[0]
    shorter = problem.asked_pages is None and division.pages < problem.model.pages(_usual(problem, division))
    return "fits_changed" if fewer or shorter else "fits"


def _usual(problem: Problem, division: Division) -> int:
    """Tokens of the default KV pool."""
    return min(CONTEXT, problem.window) * division.running


# ── the ledger ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _ledger(problem: Problem, division: Division) -> tuple[LedgerLine, ...]:
    running, pages = division.running, division.pages
    model, experts = problem.model, problem.experts
    scratch = problem.scratch(division.chunk, division.staging, running, pages)
    terms = [
        *model.terms,
        Term(
            "kv_pages", (pages + 1) * model.page_bytes, detail=f"{pages:,} pages of {model.page_size} tokens, 1 dummy"
        ),
        Term("prefill_transient", scratch, detail=_scratch_detail(problem, division)),
        Term("allocator", scratch // FRAGMENTS, basis="assumed", detail=f"1/{FRAGMENTS} of the transient in fragments"),
        Term("other_processes", _held(problem), basis="measured", detail=_holders(problem)),
        Term("reserve", problem.free - problem.budget, detail=f"never spent: ratio {problem.ratio:g}"),
    ]
    if experts.count:
        of = f"{division.slots:,} of {experts.count:,} experts, {Bytes(experts.slot_bytes)} each"
        terms.append(Term("expert_slots", division.slots * experts.slot_bytes, detail=of))
    by_line = {line: [term for term in terms if term.line == line] for line in LINES}
    return tuple(_line(line, found, running) for line, found in by_line.items() if any(t.bytes(running) for t in found))


def _line(line: str, terms: list[Term], running: int) -> LedgerLine:
    bases = {term.basis for term in terms if term.bytes(running)}
    basis: Basis = "assumed" if "assumed" in bases else "computed" if "computed" in bases else "measured"
    detail = "; ".join(dict.fromkeys(term.detail for term in terms if term.detail and term.bytes(running)))
    return LedgerLine(line, Bytes(sum(term.bytes(running) for term in terms)), basis, detail)


def _scratch_detail(problem: Problem, division: Division) -> str:
    tokens, context = division.chunk + division.running, problem.effective(division.pages)
    parts = [f"{part.name} {Bytes(part.bytes(tokens, context))}" for part in problem.model.prefill]
    if division.staging:
        parts.append(
            f"{division.staging} staged layers of experts {Bytes(division.staging * problem.experts.layer_bytes)}"
        )
    return f"{tokens:,} tokens: " + ", ".join(parts) if parts else f"{tokens:,} tokens"


def _held(problem: Problem) -> int:
    if problem.gpu:
        return problem.gpu.vram_total - problem.gpu.vram_free
    return problem.machine.ram_total - problem.machine.ram_free


def _holders(problem: Problem) -> str:
    holders = problem.gpu.holders if problem.gpu else ()
    return (
        ", ".join(f"{holder.name} (pid {holder.pid}) {holder.bytes}" for holder in holders) or "in use before the load"
    )


def _host(problem: Problem, division: Division) -> Host | None:
    if problem.gpu is None:
        return None
    needed = problem.host_bytes(division.backend)
    banks = 0 if division.backend == "resident" else problem.experts.count * problem.experts.bank_bytes
    limit = problem.machine.pin_limit
    wanted = banks if division.backend == "offload" else 0  # what the CPU computes is never pinned
    pinned = wanted if limit is None else min(wanted, limit)
    return Host(Bytes(needed), Bytes(problem.host_budget), Bytes(pinned), Bytes(banks - pinned))


# ── context, speed, notices ─────────────────────────────────────────────────────────────────────────────────────────
def _context(problem: Problem, division: Division | None) -> Context:
    window, each = problem.model.window, problem.model.token_bytes
    if division is None:
        return Context(None, window, each)
    effective = problem.effective(division.pages)
    return Context(effective, window, each, _price(problem, division) if effective < problem.window else None)


def _price(problem: Problem, division: Division) -> Price | None:
    """What the whole window would cost, where it can be had."""
    asked = replace(
        problem.requested,
        num_tokens=problem.window,
        num_pages=None,
        kv_reserve_tokens=None,
        max_running_requests=division.running,
    )
    there = replace(problem, requested=asked)
    found = there.solve()
    if found is None:
        return None
    rate = 1 / problem.speed.decode_s(problem.part(found.slots), found.backend)
    return Price(problem.window, division.slots - found.slots, rate)


def _expected(problem: Problem, division: Division | None) -> Expected:
    if division is None:
        return Expected(None, None, None, None)
    part = problem.part(division.slots)
    prefill = problem.speed.prefill_s(division.chunk, division.staging, part, division.backend)
    decode = problem.speed.decode_s(part, division.backend)
    return Expected(1 / decode, PROMPT / prefill, problem.turn_s(division), "computed")


def _notices(problem: Problem, division: Division, context: Context) -> list[Diagnosis]:
    found = []
    host = _host(problem, division)
    if host and host.pageable and division.backend == "offload":
        detail = (
            f"{host.pinned} of the experts can be page-locked here; {host.pageable} stay pageable and are fetched "
            "more slowly"
        )
        found.append(
            Diagnosis(PINNED_MEMORY_LIMIT, detail, {"pinned_bytes": host.pinned, "pageable_bytes": host.pageable})
        )
    if context.effective_tokens is not None and context.effective_tokens < context.window_tokens:
        detail = (
            f"A request may have {context.effective_tokens:,} of the {context.window_tokens:,} tokens of the model's "
            "window"
        )
        numbers = {"effective_tokens": context.effective_tokens, "window_tokens": context.window_tokens}
        found.append(Diagnosis(CONTEXT_SHORTER, detail, numbers))
    return found


# ── the choices ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _choices(case: Case, problem: Problem, division: Division) -> dict[str, Choice]:
    asked, gpu = problem.requested, problem.gpu
    pool = division.pages * problem.model.page_size
    context = problem.effective(division.pages)
    dtype = case.dtype(asked)
    return {
        "device": Choice("cuda" if gpu else "cpu", "computed", gpu.name if gpu else "the processor of this machine"),
        "gpu": _choice(asked.gpu, gpu.uuid if gpu else "", "where the model fits best" if gpu else "none"),
        "weight_dtype": _choice(asked.dtype, dtype, "as the checkpoint's largest part"),
        "page_size": Choice(problem.model.page_size, "default", "tokens"),
        "num_pages": _pages(problem, division),
        "max_running_requests": _choice(asked.max_running_requests, division.running, _running(division)),
        "max_prefill_tokens": _choice(asked.max_prefill_tokens, division.chunk, _chunk(problem, division)),
        "max_seq_len": Choice(context, "computed", f"least of the window {problem.window:,} and the pool {pool:,}"),
        "max_queued": _choice(
            asked.max_queued, MAX_QUEUED if asked.max_queued is None else asked.max_queued, "default"
        ),
        "queue_deadline_s": _choice(asked.queue_deadline_s, asked.queue_deadline_s or QUEUE_DEADLINE_S, "default"),
        "threads": _choice(asked.threads, asked.threads or problem.machine.cores, "physical cores"),
        **_expert_choices(problem, division),
        **_pools(problem, division),
    }


def _pools(problem: Problem, division: Division) -> dict[str, Choice]:
    """Sizes of the pools that grow with running requests; a step's own rows of a window come on top."""
    found = {}
    for name, each in problem.model.resolved:
        step = problem.model.pages(division.chunk + division.running) if name == "window_pages" else 0
        reason = f"{each} for each running request" + (f" and {step} for a step" if step else "")
        found[name] = Choice(each * division.running + step, "computed", reason)
    return found


def _expert_choices(problem: Problem, division: Division) -> dict[str, Choice]:
    asked, experts, backend = problem.requested, problem.experts, division.backend
    explicit = None if asked.moe_backend == "auto" else asked.moe_backend
    if not experts.count:
        reason = "memory holds every expert" if problem.gpu is None else "the model has no routed experts"
        if asked.moe_cache_size is not None or asked.moe_cache_rate is not None:
            reason += ", those asked for among them"
        return {
            "moe_backend": Choice("resident", "computed", reason),
            "expert_slots": Choice(0, "computed", reason),
            "staging_buffers": Choice(0, "computed", reason),
        }
    sized = problem.asked_slots is not None
    slots = f"of {experts.count:,}; at least {problem.least_slots(division.running, backend):,}"
    best = "the shortest expected turn of those that fit"
    return {
        "moe_backend": _choice(explicit, backend, best),
        "expert_slots": Choice(
            division.slots, "requested" if sized else "computed", f"asked for, {slots}" if sized else slots
        ),
        "staging_buffers": Choice(division.staging, "computed", best),
    }


def _pages(problem: Problem, division: Division) -> Choice:
    if problem.asked_pages is not None:
        return Choice(division.pages, "requested", "asked for")
    usual = _usual(problem, division)
    if division.pages * problem.model.page_size >= usual:
        return Choice(
            division.pages, "default", f"{division.running} requests of up to {min(CONTEXT, problem.window):,} tokens"
        )
    return Choice(division.pages, "computed", f"what is worth its price; {usual:,} tokens would be usual")


def _running(division: Division) -> str:
    return "default" if division.running == RUNNING[0] else f"{RUNNING[0]} would leave less context"


def _chunk(problem: Problem, division: Division) -> str:
    largest = problem.chunks[0]
    return "the longest" if division.chunk == largest else f"{largest:,} would take memory that is worth more elsewhere"


def _choice(asked: Value | None, value: Value, reason: str) -> Choice:
    return Choice(value, "requested", "asked for") if asked is not None else Choice(value, "default", reason)


def _with_measured(model: Footprint, measured: Mapping[str, int]) -> Footprint:
    """`model` with the lines in `measured` as they were seen, in place of what was worked out for them."""
    kept = tuple(term for term in model.terms if term.line not in measured)
    seen = tuple(Term(line, size, basis="measured", detail="seen in the last load") for line, size in measured.items())
    return replace(model, terms=kept + seen)
