"""Reported plans that were wrong about VRAM, with their figures: each ends as it should.

The sum that decides is done in each test; where a report leaves a number out, the test says which one is ours.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import pytest

from freetoken.core.errors import CannotEstimate
from freetoken.core.units import Bytes
from freetoken.plan.choices import Requested
from freetoken.plan.footprint import Footprint, Part, Term
from freetoken.plan.hardware import GpuProcess
from freetoken.plan.ledger import Plan
from freetoken.plan.report import plan_error
from tests.fakes.footprints import GIB, MIB, RESERVE, card, gib, line, machine, model, moe, on_card, plan

SLOT, PAGE = 2_772_480, 1_622_016
"""Qwen3.8-Flash-Next NVFP4: an expert, and a page of 64 tokens. 1 024 slots and 128 pages are 3 046 637 568 B."""
FIXED = 12_982_015_586
"""The same model's weights and state pools."""


def flash_next(fixed: int = FIXED, per_request: int = 0, minimum: int | None = None) -> Footprint:
    experts = moe(SLOT, layers=48, per_layer=512, top_k=10, minimum=minimum)
    return model(fixed, per_request=per_request, page_bytes=PAGE, page_size=64, experts=experts)


def test_ft_150_gemma_without_any_room_gets_numbers_instead_of_advice() -> None:
    # the try with a budget of -1 128 120 320 B; 6.93 GiB free is ours, within what the report gives
    free = gib(6.93)
    fixed = int(0.85 * free) + 1_128_120_320
    experts = moe(3_345_408, layers=30, per_layer=128, top_k=8, minimum=256)
    found = on_card(
        model(fixed, page_bytes=61_712, experts=experts),
        Requested(memory_ratio=0.85, kv_reserve_tokens=8_192, max_running_requests=4),
        free,
    )
    assert found.code in ("FIXED_PART_DOES_NOT_FIT", "WEIGHTS_DO_NOT_FIT")
    assert found.shortfall == 1_128_120_320 + 1_361_969_152 + 61_712
    error = plan_error(found)
    assert error is not None and error.exit_code == 6
    assert str(Bytes(free)) in error.detail and str(found.shortfall) in error.detail
    # nothing here depends on the running requests: 256 slots and 1 025 pages need more than 0.98 of 6.93 GiB
    assert fixed + 256 * 3_345_408 + 1_025 * 61_712 > 0.98 * free
    assert found.fixes == () and error.fixes == ()


def test_ft_409_a_card_of_12_gb_is_refused_from_the_numbers_alone() -> None:
    free = gib(11.5)
    assert int(0.9 * free) - FIXED == -1_868_787_708
    assert 1_024 * SLOT + 128 * PAGE == 3_046_637_568
    found = on_card(flash_next(), Requested(memory_ratio=0.9, moe_backend="cpu"), free)
    assert found.code == "WEIGHTS_DO_NOT_FIT"  # 12.09 GiB of them, 11.5 free
    # no slots: the CPU computes what is not there; 2 048 tokens are 32 pages, and one dummy
    assert found.shortfall == 1_868_787_708 + 33 * PAGE


@pytest.mark.parametrize("backend", ["offload", "cpu", "auto", None])
@pytest.mark.parametrize("size", [{"moe_cache_size": 100}, {"moe_cache_rate": 100 / (48 * 512)}])
def test_ft_409_a_cache_size_is_kept_in_every_backend(backend: Any, size: dict[str, Any]) -> None:
    asked = Requested(memory_ratio=0.9, moe_backend=backend, max_running_requests=4, num_tokens=8_192, **size)
    found = on_card(flash_next(), asked, gib(15))
    assert found.resolved is not None
    assert found.resolved.expert_slots == 100
    assert line(found, "expert_slots") == 100 * SLOT
    assert found.choices["expert_slots"].source == "requested"


def test_ft_409_the_cpu_needs_no_slots() -> None:
    limit = FIXED + 129 * PAGE + SLOT // 2  # not even one slot's worth is left
    asked = Requested(moe_backend="cpu", num_tokens=8_192, max_running_requests=4, vram_limit=limit)
    found = on_card(flash_next(), asked, gib(16))
    assert found.resolved is not None
    assert found.resolved.expert_slots == 0


def test_ft_279_slots_shrink_to_what_fits() -> None:
    free = -(-(2_205_851_166 + FIXED) * 10 // 9)  # so that 0.9 of it leaves the reported budget
    assert int(0.9 * free) - FIXED == 2_205_851_166
    asked = Requested(memory_ratio=0.9, num_tokens=8_192, moe_backend="cpu", max_running_requests=4)
    found = on_card(flash_next(), asked, free)
    assert found.resolved is not None
    assert found.resolved.expert_slots == (2_205_851_166 - 129 * PAGE) // SLOT == 720


def test_ft_279_asking_for_1024_slots_names_how_many_fit_and_the_flag() -> None:
    free = -(-(2_205_851_166 + FIXED) * 10 // 9)
    asked = Requested(
        memory_ratio=0.9, num_tokens=8_192, moe_cache_size=1_024, moe_backend="offload", max_running_requests=4
    )
    found = on_card(flash_next(), asked, free)
    assert found.code == "EXPERT_CACHE_TOO_LARGE"
    assert found.shortfall == 840_786_402 + PAGE  # as reported, and the dummy page
    assert found.diagnosis is not None
    assert found.diagnosis.numbers["largest_slots"] == 720
    assert found.diagnosis.numbers["flag"] == "--moe-cache-size"
    assert {"moe_cache_size": 720} in [dict(fix.changes) for fix in found.fixes]


def test_ft_383_explicit_tokens_are_reserved_before_slots() -> None:
    asked = Requested(memory_ratio=0.9, num_tokens=262_144, moe_backend="cpu")
    found = on_card(flash_next(), asked, gib(47.5))
    assert line(found, "kv_pages") == 4_097 * PAGE == 6_645_399_552
    assert found.resolved is not None
    assert (found.resolved.num_pages, found.resolved.expert_slots) == (4_096, 9_477)
    assert found.total <= found.budget == int(0.9 * gib(47.5))


@pytest.mark.parametrize("options", [{"num_pages": 64}, {"num_tokens": 1_024}, {"num_tokens": 1_009, "num_pages": 3}])
def test_ft_198_pages_and_tokens_are_the_same_requirement(options: dict[str, int]) -> None:
    found = on_card(model(GIB, page_bytes=16 * 1_000, page_size=16), Requested(**options), 8 * GIB)
    assert found.resolved is not None
    assert found.resolved.num_pages * found.resolved.page_size == 1_024
    assert line(found, "kv_pages") == 65 * 16_000


def test_ft_401_what_is_left_beside_the_pools_is_what_a_chunk_needs() -> None:
    slot, page = 1_775_616, 20_480
    fixed = gib(14.59) - gib(1.17) - 4_484 * slot - 131_141 * page
    # ours: 200 000 B a token make a chunk of 8 192 need 1.53 GiB, more than the 1.17 GiB that were left
    experts = moe(slot, layers=40, per_layer=256, top_k=8)
    footprint = model(fixed, page_bytes=page, experts=experts, prefill=[Part("activations", per_token=200_000)])
    for chunk in (8_192, 4_096, 256):
        asked = Requested(num_pages=131_141, max_prefill_tokens=chunk, max_running_requests=1, moe_backend="cpu")
        found = on_card(footprint, asked, gib(14.59))
        assert found.resolved is not None
        held = fixed + 131_142 * page + found.resolved.expert_slots * slot
        assert gib(14.59) - held >= 200_000 * (chunk + 1) + RESERVE
        assert line(found, "prefill_transient") == 200_000 * (chunk + 1)


@pytest.mark.parametrize("ratio", [0.8, 0.9, 0.95])
def test_ft_168_the_same_plan_holds_at_any_ratio(ratio: float) -> None:
    # 131 072 tokens of 20 480 B; ours: 400 MiB of graphs, 300 MiB of workspace, 700 MiB for a chunk of 4 096, 4 GiB
    free = gib(11.63)
    terms = [Term("graphs", 400 * MIB), Term("cuda_context", 300 * MIB)]
    experts = moe(1_775_616, layers=40, per_layer=256, top_k=8)
    footprint = model(
        4 * GIB,
        workspace=300 * MIB,
        experts=experts,
        terms=terms,
        prefill=[Part("activations", per_token=700 * MIB // 4_096)],
    )
    asked = Requested(memory_ratio=ratio, kv_reserve_tokens=131_072, max_prefill_tokens=4_096, moe_backend="cpu")
    found = on_card(footprint, asked, free)
    assert found.resolved is not None and found.resolved.num_pages >= 131_072
    named = {row.line for row in found.ledger}
    assert {"graphs", "cuda_context", "attention_workspace", "prefill_transient", "allocator"} <= named
    assert sum(row.bytes for row in found.ledger if row.line != "reserve") <= found.budget == int(ratio * free)


def test_ft_303_a_workspace_that_does_not_fit_is_named() -> None:
    # 6 GB; ours: weights of 5.2 GB, for which there would be room without the workspace
    free = 6_000_000_000
    weights, workspace = 5_200_000_000, 268_435_456
    asked = Requested(memory_ratio=0.9, num_tokens=64, max_running_requests=1)
    assert weights < int(0.9 * free) < weights + workspace
    assert on_card(model(weights), asked, free).resolved is not None
    found = on_card(model(weights, workspace=workspace), asked, free)
    assert found.code == "FIXED_PART_DOES_NOT_FIT"
    assert found.diagnosis is not None
    assert "attention_workspace" in found.diagnosis.detail
    assert found.diagnosis.numbers["fixed_bytes"] == weights + workspace
    # 5 468 435 456 and 65 pages of 20 480 B are 0.912 of the free memory
    assert [dict(fix.changes) for fix in found.fixes] == [{"memory_ratio": 0.92}]


GLM_SLOT, GLM_PAGE = 14_155_776, 839_680
"""GLM-5.3-Flash NVFP4: 576 slots and 128 pages are 8 261 206 016 B. A slot of 3 x 4 096 x 2 048 weights of 9/16 byte
leaves 839 680 B for a page."""


@pytest.mark.parametrize(("budget", "short_gib"), [(5_840_260_300, 2.25), (6_734_265_712, 1.42)])
def test_ft_397_one_layer_is_enough(budget: int, short_gib: float) -> None:
    assert 576 * GLM_SLOT + 128 * GLM_PAGE == 8_261_206_016
    assert round((8_261_206_016 - budget) / GIB, 2) == short_gib
    experts = moe(GLM_SLOT, layers=40, per_layer=288, top_k=8, minimum=288)
    footprint = model(20 * GIB, page_bytes=GLM_PAGE, page_size=64, experts=experts)
    options: dict[str, Any] = {"vram_limit": 20 * GIB + budget, "num_pages": 128, "max_running_requests": 1}
    ram = 600 * GIB
    where = machine(card(32 * GIB), ram=ram)
    found = plan(footprint, Requested(moe_backend="offload", **options), where)
    assert found.resolved is not None
    most = (budget - 129 * GLM_PAGE) // GLM_SLOT
    assert 288 <= found.resolved.expert_slots <= most
    refused = plan(footprint, Requested(moe_backend="offload", moe_cache_size=576, **options), where)
    assert refused.code == "EXPERT_CACHE_TOO_LARGE"
    assert refused.diagnosis is not None and refused.diagnosis.numbers["largest_slots"] == most
    assert refused.shortfall == 8_261_206_016 + GLM_PAGE - budget


def test_ft_397_where_one_layer_does_not_fit_either_it_says_what_to_change() -> None:
    experts = moe(GLM_SLOT, layers=40, per_layer=288, top_k=8, minimum=288)
    footprint = model(20 * GIB, page_bytes=GLM_PAGE, page_size=64, experts=experts)
    needed = 20 * GIB + 288 * GLM_SLOT + 33 * GLM_PAGE
    asked = Requested(vram_limit=needed - MIB, max_running_requests=1)
    found = plan(footprint, asked, machine(card(32 * GIB), ram=600 * GIB))
    assert found.resolved is None and found.shortfall == MIB
    offered = [dict(fix.changes) for fix in found.fixes]
    assert any("vram_limit" in changes for changes in offered)
    assert any("kv_reserve_tokens" in changes for changes in offered), "16 pages are 13 MB"


def test_ft_111_a_reserve_of_the_window_gives_the_window() -> None:
    # free memory, ratio and fixed part were not reported: 23.5 GiB and 9 GiB are ours
    found = on_card(flash_next(9 * GIB), Requested(kv_reserve_tokens=262_144, max_running_requests=1), gib(23.5))
    assert found.resolved is not None
    assert found.resolved.num_pages >= 4_096
    assert found.resolved.max_seq_len == 262_144
    assert found.context.effective_tokens == 262_144


def test_llama_27872_one_option_of_the_user_does_not_turn_planning_off() -> None:
    # 24 840 MiB where 22 341 - 1 024 may be used
    count, slot = 48 * 128, 3 * MIB
    experts = moe(slot, layers=48, per_layer=128, top_k=8)
    fixed = 24_840 * MIB - count * slot - 2_049 * 65_536
    footprint = model(fixed, page_bytes=65_536, experts=experts)
    options: dict[str, Any] = {"vram_limit": (22_341 - 1_024) * MIB, "num_tokens": 2_048, "memory_ratio": 0.98}
    refused = on_card(footprint, Requested(moe_backend="resident", **options), 22_341 * MIB)
    assert refused.resolved is None
    assert refused.code == "EXPERT_CACHE_TOO_LARGE"
    assert refused.shortfall == 3_523 * MIB
    assert refused.diagnosis is not None and refused.diagnosis.numbers["flag"] == "--moe-backend"
    assert {"moe_backend": "auto"} in [dict(fix.changes) for fix in refused.fixes]
    free = on_card(footprint, Requested(**options), 22_341 * MIB)
    assert free.resolved is not None and free.resolved.expert_slots < count


def test_lm_studio_1562_what_the_unload_releases_counts() -> None:
    total, held = 24 * 10**9, 24 * 10**9 * 80 // 100
    new = model(12_130_000_000)
    ours = GpuProcess(41, "ft", Bytes(held))
    beside = plan(new, Requested(), machine(card(total - held, total=total), holders=[ours]))
    assert beside.resolved is None
    assert [fix.id for fix in beside.fixes] == ["close_programs"]
    after = plan(new, Requested(), machine(card(total, total=total)))
    assert after.resolved is not None


@pytest.mark.parametrize("force", [Requested(), Requested(memory_ratio=0.98, max_running_requests=1)])
def test_lm_studio_1038_what_is_not_known_is_said_and_never_a_number(force: Requested) -> None:
    footprint = model(GIB, page_bytes=0)
    unknown = Footprint(
        footprint.terms, 64, 0, 4_096, footprint.work, unknown=("bytes of a cached token",), chunks=(512,)
    )
    found = on_card(unknown, force, 8 * GIB)
    assert (found.verdict, found.code, found.resolved) == ("cannot_estimate", "CANNOT_ESTIMATE", None)
    assert found.diagnosis is not None and "bytes of a cached token" in found.diagnosis.detail
    error = plan_error(found)
    assert isinstance(error, CannotEstimate)
    numbers = [value for value in found.diagnosis.numbers.values() if not isinstance(value, str)]
    assert all(isfinite(value) for value in [*numbers, found.total, found.budget])
    assert (found.context.effective_tokens, found.expected.decode_tok_s, found.expected.turn_s) == (None, None, None)


def test_lm_studio_1038_a_model_that_caches_nothing_has_its_whole_window() -> None:
    found = on_card(model(GIB, per_request=MIB, page_bytes=0, page_size=16, window=4_096), Requested(), 8 * GIB)
    assert found.verdict == "fits"
    assert found.context.effective_tokens == 4_096
    assert line(found, "kv_pages") == 0
    assert line(found, "state") == 4 * MIB


def test_ollama_10765_every_term_is_a_line() -> None:
    # 795.9 + 1 024 + 457 + 2 layers = 4 362.9 MiB, where 3.2 GiB are free: a layer is 1 043 MiB
    terms = [
        Term("weights", int(795.9 * MIB), detail="projector"),
        Term("graphs", 1_024 * MIB, detail="compute graph"),
        Term("cuda_context", 457 * MIB),
    ]
    footprint = model(2 * 1_043 * MIB, page_bytes=0, page_size=16, terms=terms)
    found = on_card(footprint, Requested(), gib(3.2))
    assert found.resolved is None
    assert found.code == "FIXED_PART_DOES_NOT_FIT"
    assert round(found.total / MIB, 1) == 4_362.9
    assert round(line(found, "weights") / MIB, 1) == 795.9 + 2_086
    assert line(found, "graphs") == 1_024 * MIB
    assert line(found, "cuda_context") == 457 * MIB
    assert "projector" in next(row.detail for row in found.ledger if row.line == "weights")
    assert sum(row.bytes for row in found.ledger if row.line not in ("reserve", "other_processes")) == found.total


def three_and_one() -> list[Any]:
    return [*(card(11 * 10**9, uuid=f"GPU-{n}") for n in range(3)), card(6 * 10**9, uuid="GPU-small")]


def test_ollama_1465_cards_are_never_added_up() -> None:
    # 39 GB together, 11 GB at most on one
    found = plan(model(12 * 10**9), Requested(), machine(*three_and_one()))
    assert found.resolved is None
    assert found.code == "WEIGHTS_DO_NOT_FIT"
    assert found.budget == 11 * 10**9 - max(11 * 10**9 - int(0.95 * 11 * 10**9), RESERVE)
    assert found.diagnosis is not None and found.diagnosis.numbers["free_bytes"] == 11 * 10**9


def test_ollama_1465_the_card_where_it_fits_is_taken_and_another_can_be_named() -> None:
    for order in (three_and_one(), three_and_one()[::-1]):
        found = plan(model(8 * 10**9), Requested(), machine(*order))
        assert found.resolved is not None and found.resolved.gpu != "GPU-small"
    named = plan(model(8 * 10**9), Requested(gpu="GPU-2"), machine(*three_and_one()))
    assert named.resolved is not None and named.resolved.gpu == "GPU-2"
    small = plan(model(8 * 10**9), Requested(gpu="GPU-small"), machine(*three_and_one()))
    assert small.code == "WEIGHTS_DO_NOT_FIT"


def test_ollama_13235_an_allocation_that_fits_nowhere_is_refused_once_for_the_better_card() -> None:
    # 9 668 469 760 B of context on two cards; 12 and 10 GiB free and weights of 4 GiB are ours
    token, tokens = 147_456, 9_668_469_760 // 147_456
    footprint = model(4 * GIB, page_bytes=token, window=131_072)
    cards = [card(12 * GIB, uuid="GPU-a"), card(10 * GIB, uuid="GPU-b")]
    found: Plan = plan(footprint, Requested(num_tokens=tokens), machine(*cards))
    assert found.code == "KV_TOO_LARGE"
    assert found.diagnosis is not None and found.diagnosis.numbers["free_bytes"] == 12 * GIB
    largest = (int(0.95 * 12 * GIB) - 4 * GIB) // token - 1
    assert found.diagnosis.numbers["largest_tokens"] == largest
    accepted = plan(footprint, Requested(num_tokens=largest), machine(*cards))
    assert accepted.resolved is not None and accepted.resolved.gpu == "GPU-a"
