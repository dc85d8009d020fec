"""`ft plan` as its user runs it: no daemon, no GPU, no weights needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Ft
from tests.fakes.checkpoint import tiny

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    """Qwen3-30B-A3B before anything but its config.json is downloaded."""
    folder = tmp_path / "Qwen3-30B-A3B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_config_is_enough_for_a_card_that_is_only_described(ft: Ft, qwen: Path) -> None:
    ran = ft("plan", str(qwen), "--vram", "24GiB", "--ram", "96GiB", "--json")
    assert ran.code == 0, ran.err
    plan = ran.json
    assert plan["schema"] == 1 and plan["verdict"] == "fits_changed"
    assert plan["machine"]["gpus"][0]["vram_free"] == 24 << 30 and plan["machine"]["ram_free"] == 96 << 30
    lines = {line["line"]: line for line in plan["ledger"]}
    # 3 matrices of 768 x 2048 in bf16, 128 experts in each of 48 layers
    assert plan["resolved"]["expert_slots"]["value"] * 3 * 768 * 2048 * 2 == lines["expert_slots"]["bytes"]
    assert plan["host"]["needed_bytes"] >= 48 * 128 * 3 * 768 * 2048 * 2
    # keys and values of 4 heads of 128 in bf16 over 48 layers
    assert plan["context"]["bytes_per_token"] == 2 * 4 * 128 * 2 * 48
    spent = sum(line["bytes"] for line in plan["ledger"] if line["line"] not in ("other_processes", "reserve"))
    assert spent == plan["total_bytes"] <= plan["budget_bytes"] and plan["shortfall_bytes"] == 0
    assert all(choice["reason"] and choice["source"] for choice in plan["resolved"].values())
    codes = [notice["code"] for notice in plan["notices"]]
    assert "GPU_ENGINE_MISSING" in codes and "ESTIMATED" in codes


def test_what_does_not_fit_ends_with_6_and_says_why(ft: Ft, qwen: Path) -> None:
    ran = ft("plan", str(qwen), "--vram", "24GiB", "--ram", "32GiB")
    assert ran.code == 6
    assert "HOST_RAM_TOO_SMALL" in ran.out and "54.00 GiB" in ran.out, "the experts' 54 GiB are named"


def test_a_fix_can_be_copied_and_works(ft: Ft, qwen: Path) -> None:
    asked = ["plan", str(qwen), "--vram", "12GiB", "--ram", "96GiB", "--num-tokens", "200000"]
    refused = ft(*asked, "--json")
    assert refused.code == 6 and refused.json["code"] == "KV_TOO_LARGE"
    flags = [str(part) for flag, value in refused.json["fixes"][0]["set"].items() for part in (flag, value)]
    assert flags[0] == "--num-tokens"
    assert f"ft load {qwen} {' '.join(flags)}" in ft(*asked).out
    assert ft(*asked[:-2], *flags).code == 0
    one_page_more = str(int(flags[1]) + 16)
    assert ft(*asked[:-1], one_page_more).code == 6


def test_people_read_a_ledger_a_verdict_and_the_context(ft: Ft, qwen: Path) -> None:
    out = ft("plan", str(qwen), "--vram", "24GiB", "--ram", "96GiB").out
    rows = out.partition("\n\n")[0].splitlines()
    table = [row for row in rows if row.startswith(("weights ", "kv_pages ", "expert_slots ", "total "))]
    columns = {row.index(" GiB") for row in table if " GiB  " in row}
    assert len(table) == 4 and len(columns) == 1, "sizes stand under each other"
    assert "effective context" in out and "of window 40,960 tokens" in out
    assert "not measured" in out


def test_it_plans_this_machine_without_flags(ft: Ft, tmp_path: Path) -> None:
    folder = tiny("qwen3_moe", tmp_path / "tiny")
    plan = ft("plan", str(folder), "--json").json
    assert plan["verdict"] == "fits" and plan["resolved"]["device"]["value"] == "cpu"
    assert plan["machine"]["gpus"] == [] and plan["host"] is None


def test_ids_of_the_shelf_are_known_and_others_are_not(ft: Ft, home: Path, tmp_path: Path) -> None:
    shelved = home / "models" / "org--m" / "main"
    tiny("llama", shelved)
    (shelved / "model.json").write_text(json.dumps({"id": "org/m", "source": {}, "files": {}, "state": "complete"}))
    assert ft("plan", "org/m").code == 0
    ran = ft("plan", "org/other")
    assert ran.code == 1 and "org/m" in ran.err


def test_a_file_that_cannot_be_read_is_said(ft: Ft, qwen: Path) -> None:
    config = qwen / "config.json"
    config.unlink()
    config.symlink_to(config)  # for every user, root too: too many levels of symbolic links
    ran = ft("plan", str(qwen))
    assert ran.code == 1 and "config.json" in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--vram", "much"), 2, "--vram"),
        (("--moe-backend", "offload"), 2, "needs a GPU"),
        (("--vram-limit", "4GiB"), 2, "There is no GPU"),
        (("--vram", "24GiB", "--ram", "96GiB", "--gpu", "GPU-none"), 2, "GPU-none"),
        (("--vram", "24GiB", "--ram", "96GiB", "--moe-backend", "offload", "--moe-cache-size", "4"), 2, "too few"),
        (("--moe-backend", "sideways"), 2, "sideways"),
    ],
)
def test_contradictions_are_refused(ft: Ft, qwen: Path, flags: tuple[str, ...], code: int, said: str) -> None:
    ran = ft("plan", str(qwen), *flags)
    assert (ran.code, said in ran.err) == (code, True), ran.err
