"""The plan: it never spends more than it may, explicit sizes are requirements, and what it offers works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.catalog.checkpoint import Checkpoint, TextSource
from freetoken.catalog.spec import (
    Attention,
    Branch,
    Dense,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    Routed,
    Router,
)
from freetoken.core.units import Bytes
from freetoken.plan import memory
from freetoken.plan.choices import Requested
from freetoken.plan.hardware import Machine, snapshot
from freetoken.plan.placement import PAGE, RESERVE, Plan, make_plan
from freetoken.plan.report import lines, resolved_from_json, to_json

GIB = 1 << 30


def model(layers: int = 4, experts: int = 8, window: int = 8192) -> ModelSpec:
    norm = NormSpec()
    attention = Attention(heads=8, kv_heads=2, head_dim=64, rope="main", scale=0.125)
    body = Routed(Router(experts, min(2, experts)), 256) if experts else Dense(1024)
    branch = Branch("experts" if experts else "dense", body)
    return ModelSpec(
        hidden=512,
        layers=(LayerSpec(attention, (branch,), norm, norm),) * layers,
        embed=EmbeddingSpec(32_000),
        head=HeadSpec(tied=True, norm=norm),
        ropes={"main": RopeSpec(1e6, 64)},
        max_positions=window,
    )


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


def test_the_default_plan_gives_every_request_a_full_window() -> None:
    found = plan()
    assert found.verdict == "fits"
    assert found.resolved is not None
    assert found.resolved.num_pages * PAGE == 4 * 8192
    assert found.resolved.max_seq_len == 8192
    assert found.resolved.weight_dtype == "bfloat16"
    assert found.error() is None


def test_weights_are_counted_by_hand() -> None:
    # embed 32 000 x 512; a layer: q and o 512 x 512, k and v 128 x 512, router 8 x 512, 8 experts of 3 x 256 x 512.
    # The router and the norms stay fp32.
    matrices = 32_000 * 512 + 4 * (2 * 512 * 512 + 2 * 128 * 512 + 8 * 3 * 256 * 512)
    fp32 = 512 * (2 * 4 + 1) + 4 * 8 * 512
    assert memory.weight_bytes(model(), "bfloat16") == 2 * matrices + 4 * fp32
    assert memory.expert_bytes(model(), "bfloat16") == 2 * 4 * 8 * 3 * 256 * 512
    assert memory.kv_token_bytes(model()) == 4 * 2 * 2 * 64 * 4


def test_a_small_machine_gets_less_context_and_is_told() -> None:
    fixed = plan().total - next(line.bytes for line in plan().ledger if line.line == "kv_pages")
    room = fixed + RESERVE + 4000 * memory.kv_token_bytes(model())
    found = plan(free=room + (room // 10))
    assert found.verdict == "fits_changed"
    assert found.resolved is not None
    assert 2048 <= found.resolved.max_seq_len < 4 * 8192
    assert any("effective context" in line for line in lines(found))


def test_explicit_kv_is_a_requirement_to_the_page() -> None:
    refused = plan(Requested(num_tokens=10**9))
    assert (refused.verdict, refused.code) == ("does_not_fit", "KV_TOO_LARGE")
    largest = refused.numbers["largest_tokens"]
    assert plan(Requested(num_tokens=largest)).verdict == "fits"
    one_more = plan(Requested(num_pages=largest // PAGE + 1))
    assert one_more.code == "KV_TOO_LARGE"
    error = one_more.error()
    assert error is not None
    assert f"{largest:,}" in error.detail
    assert plan(Requested(num_tokens=largest // 2, num_pages=largest // PAGE)).resolved.num_pages == largest // PAGE  # type: ignore[union-attr]


def test_weights_that_do_not_fit_are_refused_with_both_numbers() -> None:
    found = plan(free=GIB // 4)
    assert found.code == "HOST_RAM_TOO_SMALL"
    error = found.error()
    assert error is not None
    assert str(found.total) in error.detail
    assert error.exit_code == 6
    assert error.fixes


def test_a_fix_is_offered_only_where_it_works() -> None:
    spec = model(layers=48)
    # With nothing free, a plan's total is the least that it needs.
    least = [plan(Requested(dtype=dtype), free=0, spec=spec).total for dtype in ("float32", "bfloat16")]
    between = sum(least) // 2 + RESERVE
    found = plan(Requested(dtype="float32"), free=between, spec=spec)
    assert found.code == "HOST_RAM_TOO_SMALL"
    assert ("--dtype", "bfloat16") in found.fixes
    assert plan(Requested(dtype="bfloat16"), free=between, spec=spec).resolved is not None


def test_the_json_carries_the_decisions_back() -> None:
    found = plan(Requested(max_running_requests=16, threads=2))
    document = to_json(found)
    assert resolved_from_json(document) == found.resolved
    assert document["resolved"]["max_running_requests"] == {"value": 16, "source": "requested", "reason": "asked for"}
    assert document["total_bytes"] == sum(line["bytes"] for line in document["ledger"]) <= document["budget_bytes"]


requests = st.builds(
    Requested,
    max_running_requests=st.none() | st.integers(1, 64),
    max_seq_len=st.none() | st.integers(1, 10**6),
    max_prefill_tokens=st.none() | st.integers(16, 8192),
    num_tokens=st.none() | st.integers(1, 10**7),
    memory_ratio=st.none() | st.floats(0.1, 0.98),
    dtype=st.sampled_from([None, "float32", "bfloat16"]),
)


@settings(max_examples=200, deadline=None)
@given(
    requested=requests,
    free=st.integers(0, 64 * GIB),
    layers=st.integers(1, 32),
    experts=st.sampled_from([0, 8, 64]),
    dtype=st.sampled_from(["BF16", "F32", "Q4_1"]),
)
def test_a_plan_never_spends_more_than_it_may(
    requested: Requested, free: int, layers: int, experts: int, dtype: Literal["BF16", "F32", "Q4_1"]
) -> None:
    machine = Machine(Bytes(free), Bytes(free), 2)
    found = make_plan(checkpoint(model(layers, experts), dtype), requested, machine)
    if found.resolved is not None:
        assert found.total <= found.budget <= max(0, free - RESERVE)
        assert found.resolved.num_pages * PAGE >= max(requested.num_tokens or 0, found.resolved.max_seq_len)
    else:
        assert found.error() is not None
    more = make_plan(checkpoint(model(layers, experts), dtype), requested, replace(machine, ram_free=Bytes(free + GIB)))
    if found.resolved is not None and more.resolved is not None:
        assert more.resolved.max_seq_len >= found.resolved.max_seq_len
    assert found.resolved is None or more.resolved is not None


def test_this_machine_can_be_read() -> None:
    machine = snapshot()
    assert 0 < machine.ram_free <= machine.ram_total
    assert machine.cores >= 1


@pytest.mark.parametrize("requested", [Requested(), Requested(num_tokens=64)])
def test_people_see_the_ledger_add_up(requested: Requested) -> None:
    text = lines(plan(requested))
    assert any(row.startswith("weights") for row in text)
    assert any(row.startswith("total") for row in text)
