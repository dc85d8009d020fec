"""`ft status` from what GET /engine says."""

from __future__ import annotations

from typing import Any

from freetoken.cli.status import experts, rows
from tests.cli.conftest import Ft
from tests.fakes.control import Control, problem

GIB = 1 << 30
LEDGER = [
    {"line": "weights", "bytes": 3 * GIB, "basis": "computed", "detail": "bfloat16"},
    {"line": "kv_pages", "bytes": 2 * GIB, "basis": "computed", "detail": ""},
    {"line": "allocator", "bytes": GIB, "basis": "assumed", "detail": ""},
]
ENGINE: dict[str, Any] = {
    "state": "ready",
    "model": "demo",
    "options": {"num_pages": 64},
    "pid": 42,
    "uptime_ms": 90_000,
    "failure": None,
    "plan": {"context": {"effective_tokens": 4096, "window_tokens": 8192}},
    "measured": {"weights_bytes": 5 * GIB},
    "stats": {
        "running": 1,
        "queued": 2,
        "decode_tok_s": 31.04,
        "prefill_tok_s": 420.0,
        "prompt_tokens": 1234,
        "cached_tokens": 960,
        "output_tokens": 456,
        "pages_total": 64,
        "pages_free": 60,
        "pages_cached": 3,
    },
    "experts": {"layers": 2, "experts": 4, "tokens": [[25, 25, 25, 25], [70, 10, 10, 10]], "hits": {}},
    "memory": {"rss_bytes": 6 * GIB, "budget_bytes": 20 * GIB, "total_bytes": 6 * GIB, "ledger": LEDGER},
}


def test_one_screen_says_it_all(ft: Ft, server: Control) -> None:
    server.engine = ENGINE
    ran = ft("status")
    assert ran.code == 0
    shown = {
        line.split("  ")[0] or line.strip().split("  ")[0]: line.split("  ")[-1].strip()
        for line in ran.out.splitlines()
    }
    assert shown["engine"] == "ready, up 90.0 s (pid 42)"
    assert shown["model"] == "demo (num_pages=64)"
    assert shown["context"] == "4,096 of the model's 8,192 tokens"
    assert shown["requests"] == "1 running, 2 waiting"
    assert shown["now"] == "31.0 tok/s decode, 420 tok/s prefill"
    assert shown["tokens"] == "1,234 prompt (960 from the prefix cache), 456 output"
    assert shown["KV pages"] == "64: 60 free, 3 hold prefixes"
    assert shown["memory"] == "6.00 GiB resident now; reserved, of 20.00 GiB that may be used:"
    assert shown["weights"] == "5.00 GiB (measured, bfloat16)", "what was measured replaces what was planned"
    assert shown["kv pages"] == "2.00 GiB (computed)"
    columns = {line.index(shown[key]) for line in ran.out.splitlines() for key in shown if line.strip().startswith(key)}
    assert len(columns) == 1, "the values stand under each other"


def test_json_is_the_engine_as_it_is(ft: Ft, server: Control) -> None:
    server.engine = ENGINE
    assert ft("status", "--json").json == ENGINE


def test_experts_are_summed_up() -> None:
    text = experts(ENGINE["experts"])
    assert text.startswith("2 × 4 experts, 200 choices")
    assert "10.0% to 70.0%" in text
    assert experts({"layers": 30, "experts": 8, "tokens": [[0] * 8] * 30}) == "30 × 8 experts, no token routed yet"
    assert experts({"layers": 30, "experts": 8, "tokens": []}) == "30 × 8 experts, no token routed yet"


def test_what_is_not_known_is_left_out() -> None:
    assert list(rows({"state": "stopped", "model": None, "stats": None})) == [("engine", "stopped")]


def test_a_failure_is_shown_with_its_remedies() -> None:
    failed = {"state": "failed", "model": "demo", "failure": problem("ENGINE_DIED", "killed\x1b", "load it again")}
    assert list(rows(failed))[2:] == [("failed", "killed\\x1b"), ("  fix", "load it again")]
