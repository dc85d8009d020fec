"""What is chosen for a real model on a CPU and among several cards, with its reasons; from headers to decisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.catalog.checkpoint import Checkpoint, TextSource
from freetoken.catalog.spec import ModelSpec
from freetoken.core.errors import SettingError
from freetoken.core.units import Bytes
from freetoken.plan.choices import Requested
from freetoken.plan.division import RESERVE
from freetoken.plan.hardware import Gpu, Machine, described, snapshot
from freetoken.plan.kept import PAGE
from freetoken.plan.ledger import Plan
from freetoken.plan.placement import make_plan
from tests.fakes import footprints, models

GIB = 1 << 30


def model(layers: int = 4, experts: int = 8, window: int = 8192) -> ModelSpec:
    branch = models.routed(experts, min(2, experts), 256) if experts else models.dense(1024)
    return models.spec(512, (models.layer(models.attention(8, 2, 64), branch),) * layers, window=window)


def checkpoint(spec: ModelSpec, dtype: str = "BF16") -> Checkpoint:
    return Checkpoint(
        path=Path("model"),
        format="safetensors",
        family="test",
        spec=spec,
        tensors={},
        dtype=dtype,
        bytes_on_disk=0,
        bos_id=None,
        eos_ids=(),
        sampling_defaults={},
        text=TextSource("hf", Path("model")),
    )


def plan(requested: Requested | None = None, free: int = 8 * GIB, spec: ModelSpec | None = None) -> Plan:
    machine = Machine(Bytes(2 * free), Bytes(free), 4)
    return make_plan(checkpoint(spec or model()), requested or Requested(), machine)


# ── on a CPU ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_default_gives_every_request_a_full_window() -> None:
    resolved = plan().resolved
    assert resolved is not None and plan().verdict == "fits"
    assert resolved.num_pages * PAGE == 4 * 8192 and resolved.max_seq_len == 8192
    assert (resolved.weight_dtype, resolved.device, resolved.max_prefill_tokens) == ("bfloat16", "cpu", 512)


def test_a_small_machine_gets_less_context_and_is_told() -> None:
    whole = plan()
    rest = whole.total - footprints.line(whole, "kv_pages")
    found = plan(free=rest + 4000 * whole.context.bytes_per_token + RESERVE)
    assert found.verdict == "fits_changed" and found.resolved is not None
    assert 2048 <= found.resolved.max_seq_len < 8192
    assert [notice.code for notice in found.notices] == ["CONTEXT_SHORTER_THAN_WINDOW"]
    assert "usual" in found.choices["num_pages"].reason


def test_weights_that_do_not_fit_are_refused_with_both_numbers() -> None:
    found = plan(free=GIB // 4)
    assert found.code == "HOST_RAM_TOO_SMALL" and found.diagnosis is not None
    assert str(found.budget) in found.diagnosis.detail and "256.00 MiB free" in found.diagnosis.detail


def test_a_smaller_dtype_is_offered_only_where_it_works() -> None:
    spec = model(layers=48)
    least = {dtype: plan(Requested(dtype=dtype), free=0, spec=spec).total for dtype in ("float32", "bfloat16")}  # type: ignore[arg-type]
    between = sum(least.values()) // 2 + RESERVE
    found = plan(Requested(dtype="float32"), free=between, spec=spec)
    assert any(fix.changes == {"dtype": "bfloat16"} for fix in found.fixes)
    assert plan(Requested(dtype="bfloat16"), free=between, spec=spec).resolved is not None
    hopeless = plan(Requested(dtype="float32"), free=least["bfloat16"] // 2, spec=spec)
    assert not any("dtype" in fix.changes for fix in hopeless.fixes)


def test_expert_slots_asked_of_a_cpu_are_among_those_that_memory_holds() -> None:
    found = plan(Requested(moe_cache_size=5))
    assert found.resolved is not None and found.resolved.expert_slots == 0
    assert "asked for" in found.choices["expert_slots"].reason


@pytest.mark.parametrize(
    "requested", [Requested(moe_backend="offload"), Requested(vram_limit=GIB), Requested(gpu="GPU-1")]
)
def test_what_needs_a_card_is_refused_without_one(requested: Requested) -> None:
    with pytest.raises(SettingError, match="GPU"):
        plan(requested)


def test_what_a_load_has_shown_takes_the_place_of_what_was_assumed() -> None:
    machine = Machine(Bytes(16 * GIB), Bytes(8 * GIB), 4)
    before = make_plan(checkpoint(model()), Requested(), machine)
    after = make_plan(checkpoint(model()), Requested(), machine, {"allocator": 100 << 20})
    fragments = footprints.line(before, "prefill_transient") // 8
    assert footprints.line(after, "allocator") == (100 << 20) + fragments
    assert after.total - before.total == footprints.line(after, "allocator") - footprints.line(before, "allocator")


@settings(max_examples=100, deadline=None)
@given(
    requested=st.builds(
        Requested,
        max_running_requests=st.none() | st.integers(1, 64),
        max_seq_len=st.none() | st.integers(16, 10**6),
        max_prefill_tokens=st.none() | st.integers(1, 8192),
        num_tokens=st.none() | st.integers(16, 10**7),
        memory_ratio=st.none() | st.floats(0.1, 0.98),
        dtype=st.sampled_from([None, "float32", "bfloat16"]),
    ),
    free=st.integers(0, 64 * GIB),
    layers=st.integers(1, 32),
    experts=st.sampled_from([0, 8, 64]),
    dtype=st.sampled_from(["BF16", "F32", "Q4_1"]),
)
def test_a_real_model_on_any_machine(requested: Requested, free: int, layers: int, experts: int, dtype: str) -> None:
    machine = Machine(Bytes(free), Bytes(free), 2)
    found = make_plan(checkpoint(model(layers, experts), dtype), requested, machine)
    more = make_plan(checkpoint(model(layers, experts), dtype), requested, replace(machine, ram_free=Bytes(free + GIB)))
    if found.resolved is None:
        assert found.diagnosis is not None and found.context.effective_tokens is None
        return
    assert found.total <= found.budget <= max(0, free - RESERVE)
    assert found.resolved.num_pages * PAGE >= max(requested.num_tokens or 0, found.resolved.max_seq_len)
    assert more.resolved is not None and more.resolved.max_seq_len >= found.resolved.max_seq_len


# ── among cards ─────────────────────────────────────────────────────────────────────────────────────────────────────
MOE = footprints.model(4 * GIB, experts=footprints.moe(2 << 20, layers=40, per_layer=256, top_k=8))


def card(uuid: str, free: int) -> Gpu:
    return footprints.card(free, uuid=uuid)


def test_the_card_where_the_model_fits_best_is_taken_and_cards_are_never_added_up() -> None:
    where = footprints.machine(card("small", 8 * GIB), card("large", 12 * GIB), card("tiny", 2 * GIB))
    found = footprints.plan(MOE, Requested(), where)
    assert found.resolved is not None and found.resolved.gpu == "large"
    assert found.total <= found.budget < 12 * GIB
    none = footprints.plan(footprints.model(15 * GIB), Requested(), where)
    assert none.code == "WEIGHTS_DO_NOT_FIT", "22 GiB in all hold it, none of the cards does"


def test_a_card_that_was_asked_for_is_taken_or_nothing() -> None:
    where = footprints.machine(card("small", 8 * GIB), card("large", 12 * GIB))
    found = footprints.plan(MOE, Requested(gpu="small"), where)
    assert found.resolved is not None and found.resolved.gpu == "small"
    with pytest.raises(SettingError, match="small, large"):
        footprints.plan(MOE, Requested(gpu="other"), where)


def test_everything_resident_needs_no_banks_in_host_memory() -> None:
    """20 GiB of experts on a card of 48 GiB in a computer with 8."""
    found = footprints.plan(MOE, Requested(), footprints.machine(card("big", 48 * GIB), ram=8 * GIB))
    assert found.resolved is not None and found.resolved.moe_backend == "resident"
    assert found.resolved.expert_slots == 40 * 256 and found.host is not None and found.host.needed == 0
    short = footprints.plan(MOE, Requested(), footprints.machine(card("mid", 16 * GIB), ram=8 * GIB))
    assert short.code == "HOST_RAM_TOO_SMALL"


# ── the machine ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_this_machine_can_be_read_and_a_container_s_limit_counts() -> None:
    machine = snapshot()
    assert 0 < machine.ram_free <= machine.ram_total and machine.cores >= 1
    limited = snapshot(memory_limit=1 << 30)
    assert limited.ram_total == 1 << 30 and limited.ram_free < 1 << 30


def test_a_described_machine_leaves_the_rest_as_it_is() -> None:
    base = Machine(Bytes(64 * GIB), Bytes(32 * GIB), 6, (card("here", 8 * GIB),))
    assert described(None, None, base) == base
    other = described(Bytes(24 * GIB), Bytes(16 * GIB), base)
    assert [gpu.vram_free for gpu in other.gpus] == [24 * GIB] and other.ram_free == 16 * GIB and other.cores == 6


# ── more memory ─────────────────────────────────────────────────────────────────────────────────────────────────────
SWEPT = {
    # a state of 700 MiB a request: four requests fit where one alone had room for a longer context
    "states": footprints.model(
        2 * GIB, per_request=700 << 20, experts=footprints.moe(2 << 20, layers=40, per_layer=128, top_k=8)
    ),
    # context that is dear: where nearly all experts fit, it costs a larger part of a faster decode
    "dear": footprints.model(
        1 * GIB, page_bytes=90_000, experts=footprints.moe(1 << 20, layers=24, per_layer=128, top_k=8)
    ),
    "dense": footprints.model(3 * GIB, page_bytes=200_000, window=65_536),
}


@pytest.mark.parametrize("name", SWEPT)
def test_a_larger_card_never_gets_a_shorter_context(name: str) -> None:
    """Every 64 MiB from too little to plenty; every value is seen, so that a step back cannot hide between samples."""
    seen: list[int] = []
    for free in range(2 * GIB, 32 * GIB, 64 << 20):
        tokens = footprints.on_card(SWEPT[name], Requested(), free).context.effective_tokens
        seen.append(0 if tokens is None else tokens)
    assert seen == sorted(seen)
    assert seen[0] < seen[-1] == SWEPT[name].window and len(set(seen)) > 4
