"""What holds for every model, machine and request: nothing is overspent, more memory is never worse, advice works.

Sums are done here from what was decided, never taken from the planner. Free memory is drawn around what a model needs
at least, so that every verdict is reached, which a test of its own holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import isfinite
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, find, given, reject, settings
from hypothesis import strategies as st

from freetoken.core.errors import SettingError
from freetoken.core.units import Bytes
from freetoken.plan.choices import Requested
from freetoken.plan.footprint import Experts, Footprint, Part, Term, Work
from freetoken.plan.hardware import HOST_RESERVE, Gpu, GpuProcess, Machine
from freetoken.plan.ledger import Plan
from freetoken.plan.placement import plan_footprints
from tests.fakes.footprints import GIB, KIB, MIB

DTYPES = ("float32", "bfloat16")
SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@dataclass(frozen=True)
class Case:
    footprints: dict[str, Footprint]
    requested: Requested
    machine: Machine

    def plan(self, requested: Requested | None = None, machine: Machine | None = None) -> Plan:
        """The plan; an example whose request contradicts itself is thrown away."""
        try:
            return plan_footprints(self.footprints, requested or self.requested, machine or self.machine)
        except SettingError:
            reject()

    def model(self, requested: Requested | None = None) -> Footprint:
        dtype = (requested or self.requested).dtype or next(iter(self.footprints))
        return self.footprints[dtype]


# ── what is drawn ───────────────────────────────────────────────────────────────────────────────────────────────────
@st.composite
def routed(draw: st.DrawFn) -> Experts:
    per_layer = draw(st.sampled_from([4, 16, 128, 512]))
    slot = draw(st.integers(64 * KIB, 16 * MIB))
    minimum = draw(st.sampled_from([None, None, per_layer, 2 * per_layer]))
    return Experts(draw(st.integers(1, 48)), per_layer, draw(st.integers(1, min(8, per_layer))), slot, slot, minimum)


@st.composite
def models(draw: st.DrawFn, experts: Experts | None) -> Footprint:
    sizes = st.integers(0, 2 * GIB)
    terms = [
        Term("weights", draw(st.integers(1, 8 * GIB))),
        Term("state", draw(sizes) // 8, draw(st.sampled_from([0, 0, MIB, 300 * MIB]))),
        Term("attention_workspace", draw(st.sampled_from([0, 256 * MIB]))),
        Term("cuda_context", draw(st.sampled_from([0, 512 * MIB]))),
    ]
    parts = [
        Part("activations", per_token=draw(st.integers(0, 300 * KIB))),
        Part("scratch", draw(st.sampled_from([0, 300 * MIB])), per_context=draw(st.sampled_from([0, 4 * KIB]))),
        Part("scores", per_token_context=draw(st.sampled_from([0, 0, 4]))),
    ]
    page_size = draw(st.sampled_from([1, 16, 64]))
    return Footprint(
        terms=tuple(terms),
        page_size=page_size,
        page_bytes=page_size * draw(st.integers(0, 256 * KIB)),
        window=draw(st.sampled_from([512, 2_048, 8_192, 40_960, 262_144])),
        work=Work(draw(st.integers(MIB, 8 * GIB)), draw(st.integers(10**8, 10**11)), draw(st.integers(1, 64)), 10**8),
        prefill=tuple(parts) if draw(st.booleans()) else (),
        experts=experts,
        host=(Term("cpu_staging", draw(st.sampled_from([0, GIB])), draw(st.sampled_from([0, MIB]))),),
        unknown=draw(st.sampled_from([*[()] * 15, ("a recurrent state",)])),
    )


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.none() | values


@st.composite
def requests(draw: st.DrawFn, gpu: bool, experts: Experts | None) -> Requested:
    ratio = draw(maybe(st.sampled_from([0.5, 0.85, 0.9, 0.98])))
    running = draw(maybe(st.sampled_from([1, 2, 3, 4, 8, 16])))
    if draw(st.booleans()):
        return Requested(max_running_requests=running, memory_ratio=ratio)
    slots = st.integers(1, experts.count) if experts else st.integers(1, 64)
    backends = ["auto", "resident", "cpu", *(["offload"] if gpu else [])]
    return Requested(
        max_running_requests=running,
        max_seq_len=draw(maybe(st.sampled_from([256, 4_096, 131_072]))),
        max_prefill_tokens=draw(maybe(st.sampled_from([100, 256, 2_048, 8_192]))),
        num_tokens=draw(maybe(st.integers(1, 300_000))),
        num_pages=draw(maybe(st.integers(1, 20_000))),
        kv_reserve_tokens=draw(maybe(st.sampled_from([1, 1_024, 8_192, 131_072]))),
        moe_backend=draw(maybe(st.sampled_from(backends))),
        moe_cache_size=draw(maybe(slots)),
        moe_cache_rate=draw(maybe(st.sampled_from([0.05, 0.5, 1.0]))),
        memory_ratio=ratio,
        vram_limit=draw(maybe(st.integers(GIB, 24 * GIB))) if gpu else None,
        dtype=draw(maybe(st.sampled_from(DTYPES))),
    )


def least_of(model: Footprint, requested: Requested) -> int:
    """About what the smallest plan takes: the scale at which free memory is interesting."""
    running = requested.max_running_requests or 1
    tokens = max(requested.num_tokens or 0, requested.kv_reserve_tokens or 0, (requested.num_pages or 0) * 16, 2_048)
    slots = max(requested.moe_cache_size or 0, model.experts.least(running)) if model.experts else 0
    slot = model.experts.slot_bytes if model.experts else 0
    chunk = requested.max_prefill_tokens or 256
    return model.fixed(running) + tokens * model.token_bytes + slots * slot + model.transient(chunk, 2_048)


@st.composite
def cases(draw: st.DrawFn, explicit: bool = True, most_gpus: int = 2) -> Case:
    """`explicit` False: nothing is asked for."""
    number = draw(st.sampled_from([0, 1, 1, 1, most_gpus]))
    experts = draw(st.none() | routed()) if number else None
    model = draw(models(experts))
    double = replace(
        model, terms=tuple(replace(t, fixed=t.fixed * 2) if t.line == "weights" else t for t in model.terms)
    )
    requested = draw(requests(number > 0, experts)) if explicit else Requested()
    halves, doubles = {"bfloat16": model}, {"float32": double}
    footprints = halves | doubles if draw(st.booleans()) else doubles | halves
    model = footprints[requested.dtype or next(iter(footprints))]
    scale, part = least_of(model, requested), draw(st.sampled_from([0.3, 0.8, 0.9, 0.98, 1.02, 1.1, 1.5, 3.0, 8.0]))
    if draw(st.booleans()):  # between the fixed part and the least plan: there the finer verdicts are
        scale = int(model.fixed(requested.max_running_requests or 1) + part * max(0, scale - model.fixed(1)))
        part = draw(st.sampled_from([1.0, 1.03]))
    display = draw(st.booleans())
    wanted = int(scale * part)
    free = max(int(wanted / (requested.memory_ratio or 0.95)), wanted + (512 if display else 256) * MIB)
    cards = tuple(draw(card(n, free if n == 0 else free * 3 // 4, display)) for n in range(number))
    banks = experts.count * experts.bank_bytes if experts else 0
    ram = HOST_RESERVE + GIB + int((banks or free) * draw(st.sampled_from([0.5, 0.95, 1.0, 1.5, 4.0])))
    limit = draw(maybe(st.integers(0, 64 * GIB)))
    return Case(
        footprints,
        requested,
        Machine(Bytes(ram), Bytes(ram), 4, cards, limit and Bytes(limit)),
    )


@st.composite
def card(draw: st.DrawFn, number: int, free: int, display: bool) -> Gpu:
    held = draw(st.sampled_from([0, 0, 4 * GIB]))
    holders = (GpuProcess(77, "game", Bytes(held)),) if held and draw(st.booleans()) else ()
    return Gpu(
        f"GPU-{number}",
        "card",
        Bytes(free + held),
        Bytes(free),
        link_bytes_s=draw(st.sampled_from([3, 26, 55])) * 10**9,
        display=display,
        holders=holders,
    )


def with_more(machine: Machine, more: int, where: str) -> Machine:
    if where == "ram":
        return replace(machine, ram_total=Bytes(machine.ram_total + more), ram_free=Bytes(machine.ram_free + more))
    cards = (
        replace(g, vram_total=Bytes(g.vram_total + more), vram_free=Bytes(g.vram_free + more)) for g in machine.gpus
    )
    return replace(machine, gpus=tuple(cards))


# ── sums ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def spent(model: Footprint, found: Plan) -> int:
    """What the engine will take, added up from what was decided."""
    chosen = found.resolved
    assert chosen is not None
    scratch = model.transient(chosen.max_prefill_tokens + chosen.max_running_requests, chosen.max_seq_len)
    slots = 0
    if model.experts:
        scratch += chosen.staging_buffers * model.experts.per_layer * model.experts.slot_bytes
        slots = chosen.expert_slots * model.experts.slot_bytes
    terms = sum(term.fixed + term.per_request * chosen.max_running_requests for term in model.terms)
    return terms + slots + (chosen.num_pages + 1) * model.page_bytes + scratch + scratch // 8


def may_spend(case: Case, gpu_uuid: str) -> int:
    asked, free, reserve = case.requested, int(case.machine.ram_free), 256 * MIB
    for gpu in case.machine.gpus:
        if gpu.uuid == gpu_uuid:
            free, reserve = int(gpu.vram_free), (512 if gpu.display else 256) * MIB
    limits = [int((asked.memory_ratio or 0.95) * free), free - reserve]
    return max(0, min([*limits, asked.vram_limit] if asked.vram_limit is not None else limits))


@settings(SLOW, max_examples=400)
@given(cases())
def test_no_plan_spends_more_than_it_may(case: Case) -> None:
    found = case.plan()
    assert found.shortfall == max(0, found.total - found.budget)
    if found.resolved is None:
        assert found.diagnosis is not None
        assert found.verdict in ("does_not_fit", "cannot_estimate")
        return
    assert found.diagnosis is None and found.verdict in ("fits", "fits_changed")
    model, chosen = case.model(), found.resolved
    assert found.budget == may_spend(case, chosen.gpu)
    assert found.total == spent(model, found) <= found.budget
    if found.host is not None:
        apart = model.experts is not None and chosen.moe_backend != "resident"
        banks = model.experts.count * model.experts.bank_bytes if apart and model.experts else 0
        assert found.host.needed >= banks + sum(term.fixed for term in model.host)
        assert found.host.needed <= found.host.allowed == max(0, case.machine.ram_free - HOST_RESERVE)
        assert found.host.pinned + found.host.pageable == banks
        assert case.machine.pin_limit is None or found.host.pinned <= case.machine.pin_limit


@settings(SLOW, max_examples=300)
@given(cases())
def test_what_was_asked_for_is_what_is_decided(case: Case) -> None:
    found = case.plan()
    assume(found.resolved is not None)
    assert found.resolved is not None
    asked, chosen, model = case.requested, found.resolved, case.model()
    pages = max(-(-max(asked.num_tokens or 0, asked.kv_reserve_tokens or 0) // model.page_size), asked.num_pages or 0)
    if asked.num_tokens is not None or asked.num_pages is not None:
        assert chosen.num_pages == pages
    assert chosen.num_pages >= pages
    assert asked.max_running_requests in (None, chosen.max_running_requests)
    assert asked.max_prefill_tokens in (None, chosen.max_prefill_tokens)
    assert asked.dtype in (None, chosen.weight_dtype)
    window = min(model.window, asked.max_seq_len or model.window)
    assert chosen.max_seq_len == min(window, chosen.num_pages * model.page_size)
    assert chosen.max_seq_len == found.context.effective_tokens
    if not model.experts:
        assert chosen.expert_slots == 0
        return
    assert asked.moe_backend in (None, "auto", chosen.moe_backend)
    if asked.moe_cache_size is not None or asked.moe_cache_rate is not None:
        size, rate = asked.moe_cache_size or 0, (asked.moe_cache_rate or 0) * model.experts.count
        assert size <= chosen.expert_slots <= min(model.experts.count, max(size, rate + 1))
    if chosen.moe_backend == "resident":
        assert chosen.expert_slots == model.experts.count
    if chosen.moe_backend == "offload":
        assert chosen.expert_slots >= model.experts.least(chosen.max_running_requests)


@settings(SLOW, max_examples=100)
@given(cases())
def test_the_same_question_has_the_same_answer(case: Case) -> None:
    found = case.plan()
    assert case.plan() == found
    if len(case.machine.gpus) == 2:
        swapped = case.plan(machine=replace(case.machine, gpus=case.machine.gpus[::-1]))
        assert (swapped.verdict, swapped.expected.turn_s) == (found.verdict, found.expected.turn_s)


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, (int, float)):
        yield value


@settings(SLOW, max_examples=200)
@given(cases())
def test_no_number_is_ever_nan_or_infinite(case: Case) -> None:
    found = case.plan()
    parts = [asdict(found.context), asdict(found.expected), [asdict(row) for row in found.ledger], found.total]
    parts += [asdict(notice) for notice in (*found.notices, *((found.diagnosis,) if found.diagnosis else ()))]
    assert all(isfinite(number) for part in parts for number in numbers_in(part))
    assert all(row.bytes >= 0 for row in found.ledger)
    if case.model().unknown:
        assert (found.code, found.resolved, found.fixes) == ("CANNOT_ESTIMATE", None, ())
        assert found.expected.turn_s is None and found.context.effective_tokens is None


# ── more memory is never worse ──────────────────────────────────────────────────────────────────────────────────────
@settings(SLOW, max_examples=300)
@given(case=cases(), tokens=st.integers(1, 100_000), running=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_for_a_given_context_more_memory_never_costs_time(case: Case, tokens: int, running: int, data: Any) -> None:
    more = data.draw(st.sampled_from([1, MIB, 100 * MIB, GIB, 40 * GIB]))
    where = data.draw(st.sampled_from(["ram", "vram"]))
    asked = replace(case.requested, num_tokens=tokens, num_pages=None, max_running_requests=running, vram_limit=None)
    before, after = case.plan(asked), case.plan(asked, with_more(case.machine, more, where))
    if before.expected.turn_s is None:
        return
    assert after.expected.turn_s is not None
    assert after.expected.turn_s <= before.expected.turn_s * (1 + 1e-12)


@settings(SLOW, max_examples=400)
@given(case=cases(), nothing=cases(explicit=False), data=st.data())
def test_with_the_default_context_more_memory_never_shortens_it(case: Case, nothing: Case, data: Any) -> None:
    more = data.draw(st.sampled_from([1, MIB, 100 * MIB, GIB, 40 * GIB]))
    where = data.draw(st.sampled_from(["ram", "vram"]))
    asked = replace(case.requested, num_tokens=None, num_pages=None)
    for each, request in ((case, asked), (nothing, nothing.requested)):
        if len(each.machine.gpus) > 1:
            each = replace(each, machine=replace(each.machine, gpus=each.machine.gpus[:1]))
        before, after = each.plan(request), each.plan(request, with_more(each.machine, more, where))
        assert (after.context.effective_tokens or 0) >= (before.context.effective_tokens or 0)


# ── advice ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@settings(SLOW, max_examples=500)
@given(cases())
def test_every_fix_that_is_offered_fits(case: Case) -> None:
    found = case.plan()
    for fix in found.fixes:
        machine = case.machine
        if not fix.changes:  # ending the programs that are named
            cards = (replace(g, vram_free=Bytes(g.vram_free + sum(h.bytes for h in g.holders))) for g in machine.gpus)
            machine = replace(machine, gpus=tuple(cards))
        fixed = case.plan(replace(case.requested, **dict(fix.changes)), machine)
        assert fixed.resolved is not None
        assert fixed.total <= fixed.budget
        if len(case.machine.gpus) < 2:
            assert fix.total == fixed.total
        assert all(getattr(case.requested, name) != value for name, value in fix.changes.items())


Change = dict[str, Any]


def neighbours(case: Case) -> Iterator[Change]:
    """One option changed, or two: to values that people would try."""
    asked, model = case.requested, case.model()
    page = model.page_size
    values: dict[str, list[Any]] = {
        "max_running_requests": [1, 2],
        "memory_ratio": [0.9, 0.95, 0.98],
        "kv_reserve_tokens": [1_024, None],
        "num_tokens": [None, 1_024, (asked.num_tokens or 4_096) // 2],
        "num_pages": [None, -(-1_024 // page)],
        "moe_cache_size": [None, *([model.experts.least(1)] if model.experts else [])],
        "moe_cache_rate": [None],
        "max_prefill_tokens": [256, None],
        "moe_backend": [None, "cpu", *(["offload"] if case.machine.gpus else [])],
        "vram_limit": [None],
        "dtype": ["bfloat16"],
        "max_seq_len": [1_024, 4_096],
    }
    ones: list[Change] = [
        {name: value}
        for name, several in values.items()
        for value in several
        if value != getattr(asked, name) and not (name == "num_tokens" and value is not None and value < 1_024)
    ]
    yield from ones
    for first, second in combinations(ones, 2):
        if first.keys() != second.keys():
            yield first | second


def feasible(case: Case, change: Change) -> bool:
    try:
        return plan_footprints(case.footprints, replace(case.requested, **change), case.machine).resolved is not None
    except SettingError:
        return False


@settings(SLOW, max_examples=60)
@given(cases(most_gpus=1))
def test_where_no_fix_is_offered_no_neighbour_fits(case: Case) -> None:
    found = case.plan()
    assume(found.diagnosis is not None and not found.fixes and not case.model().unknown)
    assert [change for change in neighbours(case) if feasible(case, change)] == []


# ── every verdict is reached ────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "code",
    [
        "CANNOT_ESTIMATE",
        "HOST_RAM_TOO_SMALL",
        "WEIGHTS_DO_NOT_FIT",
        "FIXED_PART_DOES_NOT_FIT",
        "KV_TOO_LARGE",
        "EXPERT_CACHE_TOO_LARGE",
        "PREFILL_DOES_NOT_FIT",
        "RATIO_TOO_LOW",
        "OTHER_PROCESSES_HOLD_MEMORY",
        "PINNED_MEMORY_LIMIT",
        "CONTEXT_SHORTER_THAN_WINDOW",
        "fits",
        "fits_changed",
    ],
)
def test_the_cases_reach_every_verdict(code: str) -> None:
    def reached(case: Case) -> bool:
        try:
            found = plan_footprints(case.footprints, case.requested, case.machine)
        except SettingError:
            return False
        return code in (found.code, found.verdict, *(notice.code for notice in found.notices))

    find(cases(), reached, settings=settings(SLOW, max_examples=3_000, phases=[Phase.generate]))
