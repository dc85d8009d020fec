"""Reported plans that were wrong about the computer's memory: what must be there, what may be page-locked.

The sum that decides is done in each test; where a report leaves a number out, the test says which one is ours.
"""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from freetoken.core.units import Bytes
from freetoken.plan.choices import Requested
from freetoken.plan.footprint import Footprint, Term
from freetoken.plan.hardware import HOST_RESERVE, Machine, snapshot
from tests.fakes.footprints import GIB, card, gib, machine, model, moe, plan

GB = 10**9


def with_banks(bank_bytes: int, host: tuple[Term, ...] = (), layers: int = 48, per_layer: int = 128) -> Footprint:
    """A model with 2 GiB of weights on the card and at least `bank_bytes` of experts in host memory."""
    each = -(-bank_bytes // (layers * per_layer))
    return model(2 * GIB, experts=moe(each, layers=layers, per_layer=per_layer, top_k=8), host=host)


def banks_of(footprint: Footprint) -> int:
    assert footprint.experts is not None
    return footprint.experts.count * footprint.experts.bank_bytes


def test_ft_55_what_cannot_be_pinned_stays_pageable_and_the_model_is_served() -> None:
    footprint = with_banks(17 * GB)
    pool = int(13.8 * GB)
    where = machine(card(16 * GIB), ram=32 * GB, pin_limit=pool)
    found = plan(footprint, Requested(moe_backend="offload"), where)
    assert found.resolved is not None
    assert found.host is not None
    assert (found.host.pinned, found.host.pageable) == (pool, banks_of(footprint) - pool)
    notice = next(notice for notice in found.notices if notice.code == "PINNED_MEMORY_LIMIT")
    assert str(found.host.pageable) in notice.detail
    assert notice.numbers == {"pinned_bytes": pool, "pageable_bytes": banks_of(footprint) - pool}


@pytest.mark.parametrize("tokens", [None, 16_384, 24_576])
def test_ft_27_the_cpu_pins_nothing_and_context_does_not_change_what_is_pinned(tokens: int | None) -> None:
    # a quota of 31 GiB, 63 GB of memory; 30 GiB of banks as the run that worked pinned
    footprint, quota = with_banks(30 * GIB), 31 * GIB
    where = machine(card(24 * GIB), ram=63 * GB, pin_limit=quota)
    by_link = plan(footprint, Requested(moe_backend="offload", num_tokens=tokens), where)
    by_cpu = plan(footprint, Requested(moe_backend="cpu", num_tokens=tokens), where)
    assert by_link.resolved is not None and by_link.host is not None
    assert by_link.host.pinned == banks_of(footprint) <= quota
    assert by_cpu.resolved is not None and by_cpu.host is not None
    assert (by_cpu.host.pinned, by_cpu.host.pageable) == (0, banks_of(footprint))
    assert all(notice.code != "PINNED_MEMORY_LIMIT" for notice in (*by_link.notices, *by_cpu.notices))


def test_ft_443_a_limit_below_the_banks_is_visible_as_a_split() -> None:
    footprint, limit = with_banks(130 * GIB), gib(88.08)
    found = plan(footprint, Requested(moe_backend="offload"), machine(card(32 * GIB), ram=256 * GIB, pin_limit=limit))
    assert found.verdict in ("fits", "fits_changed")
    assert found.host is not None
    assert found.host.pinned == limit
    assert found.host.pageable == banks_of(footprint) - limit
    notice = next(notice for notice in found.notices if notice.code == "PINNED_MEMORY_LIMIT")
    assert "88.08 GiB" in notice.detail and "41.92 GiB" in notice.detail


def test_ft_196_an_unknown_bank_size_is_never_taken_for_fitting() -> None:
    known = with_banks(20 * GIB)
    unknown = Footprint(
        known.terms, known.page_size, known.page_bytes, known.window, known.work, unknown=("experts' banks",)
    )
    found = plan(unknown, Requested(), machine(card(24 * GIB), ram=64 * GIB, pin_limit=15 * GIB))
    assert (found.verdict, found.code, found.resolved) == ("cannot_estimate", "CANNOT_ESTIMATE", None)
    assert found.diagnosis is not None and "experts' banks" in found.diagnosis.detail


TABLE = Term("cpu_staging", 48 * GIB, detail="token table")
RUNTIME = Term("cpu_staging", 16 * GIB, detail="runtime")
"""Ours: 63 GiB of experts, the 48 GiB table and this much make 127 GiB, 3 GiB above the limit of the report."""


def test_ft_214_a_load_that_would_be_killed_is_refused_before_it_starts() -> None:
    footprint = with_banks(63 * GIB, host=(TABLE, RUNTIME))
    found = plan(footprint, Requested(), machine(card(24 * GIB), ram=124 * GIB))
    assert (found.code, found.resolved) == ("HOST_RAM_TOO_SMALL", None)
    assert found.diagnosis is not None
    needed = banks_of(footprint) + 64 * GIB
    assert found.diagnosis.numbers["needed_bytes"] == needed
    assert 2 * GIB < needed - (124 * GIB - HOST_RESERVE) < 4 * GIB
    assert str(Bytes(needed)) in found.diagnosis.detail and "124.00 GiB" in found.diagnosis.detail
    assert found.fixes == (), "no flag makes the experts smaller"
    on_disk = plan(with_banks(63 * GIB, host=(RUNTIME,)), Requested(), machine(card(24 * GIB), ram=124 * GIB))
    assert on_disk.resolved is not None


def test_ft_214_a_containers_limit_is_what_there_is() -> None:
    used = psutil.Process().memory_info().rss
    limit = used + 64 * (1 << 20)
    found = snapshot(limit)
    assert found.ram_total == limit
    assert 0 <= found.ram_free <= limit - used // 2
    assert snapshot().ram_total == psutil.virtual_memory().total
    assert snapshot(1 << 62).ram_total == psutil.virtual_memory().total, "more than there is limits nothing"


@pytest.mark.parametrize(
    ("pool", "ram", "fits"),
    [
        (363_800_000_000, 128 * GIB, False),  # GLM-5.2 NVFP4
        (363_800_000_000, 384 * GIB, True),
        (169_000_000_000, 128 * GIB, False),  # GLM-4.7 NVFP4
        (169_000_000_000, 192 * GIB, True),
        (9_600_000_000, 16 * GIB, True),
    ],
)
def test_ft_419_a_pool_is_compared_with_the_memory_that_is_there(pool: int, ram: int, fits: bool) -> None:
    footprint = with_banks(pool)
    found = plan(footprint, Requested(), machine(card(24 * GIB), ram=ram))
    assert (found.resolved is not None) == fits
    assert found.host is not None and found.host.allowed == ram - HOST_RESERVE
    if not fits:
        assert found.code == "HOST_RAM_TOO_SMALL"
        assert found.diagnosis is not None and found.diagnosis.numbers["needed_bytes"] == banks_of(footprint)


@pytest.mark.parametrize(
    ("weights", "ram", "fits"),
    [
        (713 * GB, 1_024 * GB, True),  # two nodes: a copy for each would take 1 426 GB
        (378 * GIB, 4 * 320 * GB, True),  # four nodes of 320 GB: a copy for each would take 1 512 GiB
        (713 * GB, 640 * GB, False),
    ],
)
def test_kt_321_one_copy_serves_every_node(weights: int, ram: int, fits: bool) -> None:
    footprint = with_banks(weights, layers=58, per_layer=256)
    found = plan(footprint, Requested(), machine(card(48 * GIB), ram=ram))
    assert (found.resolved is not None) == fits
    assert found.host is not None
    needed = found.host.needed if found.diagnosis is None else found.diagnosis.numbers["needed_bytes"]
    assert needed == banks_of(footprint)


# ── the edges ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("backend", ["offload", "cpu", "auto", None])
def test_the_last_byte_of_host_memory_decides(backend: Any) -> None:
    footprint = with_banks(20 * GIB, host=(Term("cpu_staging", GIB, 1 << 20),))
    for running in (1, 4):
        needed = banks_of(footprint) + GIB + running * (1 << 20)
        asked = Requested(moe_backend=backend, max_running_requests=running, num_tokens=4_096)
        enough = machine(card(8 * GIB), ram=needed + HOST_RESERVE)
        assert plan(footprint, asked, enough).resolved is not None
        short = machine(card(8 * GIB), ram=needed + HOST_RESERVE - 1)
        assert plan(footprint, asked, short).code == "HOST_RAM_TOO_SMALL"


def test_a_model_that_is_all_in_vram_needs_no_banks() -> None:
    footprint = with_banks(20 * GIB)
    found = plan(footprint, Requested(), machine(card(48 * GIB), ram=8 * GIB))
    assert found.resolved is not None
    assert found.resolved.moe_backend == "resident"
    assert found.host is not None and (found.host.needed, found.host.pinned, found.host.pageable) == (0, 0, 0)


def test_on_a_cpu_the_ledger_is_the_hosts_memory() -> None:
    # 2 GiB of weights, 20 480 B a token; the ratio 0.95 leaves 6 GiB * 0.05 = 307 MiB, more than the reserve
    where = Machine(Bytes(8 * GIB), Bytes(6 * GIB), 4)
    found = plan(model(2 * GIB), Requested(num_tokens=100_000), where)
    assert found.host is None
    assert found.budget == int(0.95 * 6 * GIB)
    assert found.total == 2 * GIB + 100_001 * 20_480
    largest = (int(0.95 * 6 * GIB) - 2 * GIB) // 20_480 - 1
    assert plan(model(2 * GIB), Requested(num_tokens=largest), where).resolved is not None
    refused = plan(model(2 * GIB), Requested(num_tokens=largest + 1), where)
    assert refused.code == "KV_TOO_LARGE"
    assert refused.diagnosis is not None and refused.diagnosis.numbers["largest_tokens"] == largest
