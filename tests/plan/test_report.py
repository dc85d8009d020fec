"""A plan for programs and for people: flags that exist, JSON without odd numbers, errors that carry it."""

from __future__ import annotations

import dataclasses
import json

from freetoken.core.errors import KvTooLarge, leaves
from freetoken.core.errors import PlanError as Refusal
from freetoken.plan import compare
from freetoken.plan.choices import Requested
from freetoken.plan.report import flag, lines, plan_error, resolved_from_json, summary, to_json
from freetoken.settings.schema import KNOBS
from tests.fakes import footprints

GIB = 1 << 30
MODEL = footprints.model(4 * GIB, experts=footprints.moe(2 << 20, layers=40, per_layer=256, top_k=8))


def test_flags_are_those_of_the_settings() -> None:
    for field in dataclasses.fields(Requested):
        assert flag(field.name).startswith("--") and KNOBS[field.name].scope == "load"


def test_every_code_of_a_verdict_is_an_error() -> None:
    assert {
        "CANNOT_ESTIMATE",
        "HOST_RAM_TOO_SMALL",
        "WEIGHTS_DO_NOT_FIT",
        "FIXED_PART_DOES_NOT_FIT",
        "KV_TOO_LARGE",
        "EXPERT_CACHE_TOO_LARGE",
        "PREFILL_DOES_NOT_FIT",
        "RATIO_TOO_LOW",
        "RATIO_TOO_HIGH",
        "OTHER_PROCESSES_HOLD_MEMORY",
    } <= set(leaves(Refusal))
    assert {kind.exit_code for kind in leaves(Refusal).values()} == {6}


def test_the_engine_reads_back_what_was_decided() -> None:
    plan = footprints.on_card(MODEL, Requested(), 24 * GIB)
    document = json.loads(json.dumps(to_json(plan), allow_nan=False))
    assert resolved_from_json(document) == plan.resolved
    assert document["total_bytes"] == plan.total and document["context"]["window_tokens"] == plan.context.window_tokens


def test_a_log_has_every_line_and_every_choice() -> None:
    plan = footprints.on_card(MODEL, Requested(), 24 * GIB)
    memory, choices = summary(to_json(plan))
    assert all(f"{line.line} {line.bytes}" in memory for line in plan.ledger) and str(plan.total) in memory
    assert all(f"{name} {choice.value}" in choices for name, choice in plan.choices.items())


def test_a_refusal_carries_sentence_numbers_fixes_and_plan() -> None:
    plan = footprints.on_card(MODEL, Requested(num_tokens=1 << 30), 24 * GIB)
    error = plan_error(plan)
    assert isinstance(error, KvTooLarge) and error.plan == to_json(plan)
    largest = error.numbers["largest_tokens"]
    assert f"{largest:,}" in error.detail and f"--num-tokens {largest}" in error.fixes[0]
    assert any(f"--num-tokens {largest}" in row for row in lines(plan))
    assert plan_error(footprints.on_card(MODEL, Requested(num_tokens=int(largest)), 24 * GIB)) is None


def test_what_was_measured_stands_beside_what_was_planned() -> None:
    plan = {
        "ledger": [
            {"line": "weights", "bytes": 100},
            {"line": "kv_pages", "bytes": 50},
            {"line": "logits", "bytes": 1},
        ],
        "total_bytes": 151,
        "resolved": {"device": {"value": "cpu"}},
    }
    measured = {"weights_bytes": 98, "kv_bytes": 50, "process_bytes": 130}
    assert compare.compared(plan, measured) == {
        "lines": [
            {"line": "weights", "predicted_bytes": 100, "measured_bytes": 98},
            {"line": "kv_pages", "predicted_bytes": 50, "measured_bytes": 50},
        ],
        "total_predicted_bytes": 151,
        "total_measured_bytes": 130,
    }
    assert compare.residual(plan, measured) == {"allocator": 32}
    assert compare.residual(plan, {"weights_bytes": 98}) == {}
    assert compare.residual(plan, measured | {"process_bytes": 90}) == {}, "pages were taken back: says nothing"
