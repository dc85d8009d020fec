"""A model's sizes: equal to what the engine allocates, to figures worked out by hand, and to published ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from freetoken.catalog.checkpoint import Checkpoint, TextSource, open_checkpoint
from freetoken.catalog.encodings import STORED, Encoding
from freetoken.catalog.spec import Attention, IndexSpec, ModelSpec, NGram, Routed, Router
from freetoken.core.units import Bytes
from freetoken.engine.assemble import assemble
from freetoken.engine.kv.layouts import allocate
from freetoken.engine.models.build import build
from freetoken.engine.paging.rules import Layout
from freetoken.plan.choices import Requested
from freetoken.plan.footprint import Footprint
from freetoken.plan.hardware import Machine
from freetoken.plan.kept import PAGE, kept_by
from freetoken.plan.memory import SNAPSHOTS, footprint, footprints
from freetoken.plan.placement import make_plan
from freetoken.plan.storage import Storage, expert_bytes, storage
from tests.fakes import checkpoint as fake
from tests.fakes.footprints import line
from tests.fakes.models import NORM, attention, layer, mixers, qwen3_6_35b_a3b, qwen3_30b_a3b, routed, spec

torch.set_num_threads(1)
MIB, GIB = 1 << 20, 1 << 30
CARD = storage("cuda", "bfloat16")
NVFP4 = Encoding("NVFP4", 16, 9)  # 16 numbers of 4 bits and an e4m3 scale


def opened(model: ModelSpec, dtype: str = "BF16") -> Checkpoint:
    """A checkpoint of `model` as planning sees it."""
    here = Path("model")
    return Checkpoint(here, "safetensors", "test", model, {}, dtype, 0, None, (), {}, TextSource("hf", here))


def sizes(model: ModelSpec, device: Literal["cpu", "cuda"] = "cuda", dtype: str = "bfloat16") -> Footprint:
    return footprints(opened(model), device)[dtype]


def term(found: Footprint, name: str, running: int = 1) -> int:
    return sum(one.bytes(running) for one in found.terms if one.line == name)


# ── on a CPU: what the engine allocates ─────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", fake.FAMILIES)
def test_weights_and_cache_are_what_the_engine_allocates(family: str, dtype: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(fake.tiny(family, tmp_path))
    found = footprints(checkpoint, "cpu")[dtype]
    model = build(checkpoint.spec, weight_dtype=dtype, context=512)
    caches = [allocate(one.mixer, 10, PAGE) for one in checkpoint.spec.layers]
    assert term(found, "weights") == model.weight_bytes
    assert found.page_bytes * 11 == sum(cache.nbytes for cache in caches)
    assert found.experts is None


def test_a_loaded_engine_reports_what_was_planned(tmp_path: Path) -> None:
    folder = fake.tiny("qwen3_moe", tmp_path, dtype="bfloat16")
    plan = make_plan(open_checkpoint(folder), Requested(), Machine(Bytes(8 * GIB), Bytes(8 * GIB), 1))
    assert plan.resolved is not None
    engine = assemble(folder, plan.resolved, lambda *_: None, lambda: False)
    measured = dict(engine.measured)
    engine.close()
    assert plan.resolved.weight_dtype == "bfloat16"
    assert measured["weights_bytes"] == line(plan, "weights")
    assert measured["kv_bytes"] == line(plan, "kv_pages")


def test_weights_are_counted_by_hand() -> None:
    # embed and head 32 000 x 512; a layer: q and o 512 x 512, k and v 128 x 512, router 8 x 512, 8 experts of three
    # 256 x 512. The router and the norms stay fp32: two of 512 and two of 64 a layer, one at the end.
    model = spec(512, (layer(attention(8, 2, 64), routed(8, 2, 256)),) * 4)
    matrices = 2 * 32_000 * 512 + 4 * (2 * 512 * 512 + 2 * 128 * 512)
    fp32 = 512 + 4 * (2 * 512 + 2 * 64 + 8 * 512)
    experts = 4 * 8 * 3 * 256 * 512
    assert term(sizes(model, "cpu"), "weights") == 2 * (matrices + experts) + 4 * fp32
    assert term(sizes(model, "cpu", "float32"), "weights") == 4 * (matrices + experts + fp32)
    assert term(sizes(model, "cuda"), "weights") == 2 * matrices + 4 * fp32
    details = " ".join(one.detail for one in sizes(model, "cpu").terms)
    assert f"{Bytes(2 * experts)} of it 32 routed experts" in details


@pytest.mark.parametrize(
    ("stored", "device", "first"),
    [("BF16", "cpu", "bfloat16"), ("F32", "cpu", "float32"), ("Q4_1", "cpu", "float32"), ("F32", "cuda", "bfloat16")],
)
def test_the_default_weight_dtype_comes_first(stored: str, device: Literal["cpu", "cuda"], first: str) -> None:
    found = footprints(opened(qwen3_30b_a3b(), stored), device)
    assert next(iter(found)) == first
    assert set(found) == {"bfloat16", "float32"}


# ── on a card: experts ──────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Pool:
    """Experts as published: 3 x hidden x width weights each."""

    model: ModelSpec
    encoding: Encoding
    expert: float  # MB
    every: float  # GB
    picked: float  # GB read for a token


QWEN3_6, QWEN3_30B = qwen3_6_35b_a3b(), qwen3_30b_a3b()
GPT_OSS = spec(2880, (layer(attention(64, 8, 64), routed(128, 4, 2880)),) * 36)
POOLS = {
    "Qwen3-30B-A3B BF16": Pool(QWEN3_30B, STORED["BF16"], 9.44, 58.0, 3.624),
    "Qwen3-30B-A3B NVFP4": Pool(QWEN3_30B, NVFP4, 2.65, 16.3, 1.019),
    "Qwen3.6-35B-A3B BF16": Pool(QWEN3_6, STORED["BF16"], 6.29, 64.4, 2.013),
    "Qwen3.6-35B-A3B FP8": Pool(QWEN3_6, STORED["F8_E4M3"], 3.15, 32.2, 1.007),
    "Qwen3.6-35B-A3B NVFP4": Pool(QWEN3_6, NVFP4, 1.77, 18.1, 0.566),
    "gpt-oss-120b MXFP4": Pool(GPT_OSS, STORED["MXFP4"], 13.2, 60.9, 1.904),
}


@pytest.mark.parametrize("name", POOLS)
def test_pools_of_experts_have_their_published_sizes(name: str) -> None:
    pool = POOLS[name]
    found = footprint(pool.model, Storage("cuda", STORED["BF16"], pool.encoding, 2)).experts
    assert found is not None
    assert found.slot_bytes / 1e6 == pytest.approx(pool.expert, rel=3e-3)
    assert found.count * found.bank_bytes / 1e9 == pytest.approx(pool.every, rel=3e-3)
    assert found.layers * found.top_k * found.slot_bytes / 1e9 == pytest.approx(pool.picked, rel=3e-3)


def test_a_slot_of_qwen3_6_is_that_of_a_report() -> None:
    """FT #401 gives 1.6934 MiB: 9/16 byte a weight and 0.4 % more."""
    found = footprint(QWEN3_6, Storage("cuda", NVFP4, NVFP4, 2)).experts
    assert found is not None
    assert found.slot_bytes == 3 * 2048 * 512 * 9 // 16
    assert found.slot_bytes / MIB == pytest.approx(1.6934, rel=5e-3)
    assert (found.layers, found.per_layer, found.top_k) == (40, 256, 8)


def test_parts_of_a_slot_begin_on_whole_grains() -> None:
    body = Routed(Router(4, 2), 24, bias=True)
    model = spec(40, (layer(attention(2, 1, 64), replace(routed(4, 2, 24), body=body)),))
    # three matrices of 24 x 40 bf16, 1 920 B, and biases of 24, 24 and 40 fp32 numbers
    assert expert_bytes(model, body, CARD) == 3 * 1920 + 4 * (24 + 24 + 40)
    found = sizes(model).experts
    assert found is not None
    assert found.slot_bytes == 3 * 2048 + 3 * 512


# ── caches and states ───────────────────────────────────────────────────────────────────────────────────────────────
PUBLISHED = {
    "deepseek_v3": (70_272, 0, 0),
    "glm_moe_dsa": (109_824, 0, 0),
    "minimax_m2": (253_952, 0, 0),
    "minimax_m3": (137_472, 0, 0),
    "gpt_oss": (36_864, 4.46, 0),
    "qwen3_next": (24_576, 0, 73.69),
    "qwen3_5_moe": (20_480, 0, 61.41),
    "deepseek_v4": (6_880, 5.33, 10.95),
}
"""bf16: (bytes a cached token, MiB of window rows that a later token sees, MiB of state a sequence)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_caches_have_their_published_sizes(name: str) -> None:
    token, window, state = PUBLISHED[name]
    found = [kept_by(mixer, CARD) for mixer in mixers(name)]
    kept = [one for one in found if one is not None]
    assert len(kept) == len(found)
    assert sum(one.page for one in kept) == PAGE * token
    assert sum(one.row * (one.window - 1) for one in kept) / MIB == pytest.approx(window, abs=0.006)
    assert sum(one.state for one in kept) / MIB == pytest.approx(state, abs=0.006)


def test_qwen3_6_keeps_what_its_reports_say() -> None:
    """FT #168, #401: 20 480 B of keys and values a token."""
    found = sizes(QWEN3_6)
    assert (found.token_bytes, found.window) == (20_480, 262_144)
    state = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert term(found, "state", 4) == 4 * state
    assert term(found, "snapshots", 4) == 4 * SNAPSHOTS * state
    assert dict(found.resolved) == {"state_slots": 1, "snapshot_slots": SNAPSHOTS}


def test_pooled_index_keys_make_up_the_difference_of_a_report() -> None:
    """FT #383: 25 344 B a token, 768 more than twelve full layers of Qwen3-Next: 64 a layer, 128 x 2 B for 4 tokens."""
    index = IndexSpec("block_mean", heads=16, dim=128, keep=512, rope="main", norm=NORM, block=4)
    full = replace(attention(16, 2, 256), index=index)
    found = sizes(spec(2048, (layer(full),) * 12))
    assert found.token_bytes == 25_344
    assert term(found, "state", 2) == 2 * 12 * 3 * 128 * 2


def test_a_window_is_pages_a_request_on_a_card_and_full_pages_on_a_cpu() -> None:
    model = spec(512, (layer(attention(8, 2, 64, 128)), layer(attention(8, 2, 64))))
    row = 2 * 2 * 64
    assert sizes(model).page_bytes == PAGE * row * 2
    pages = Layout(PAGE, window=128).least(10**6).window  # what the engine's pool must hold for one sequence
    assert dict(sizes(model).resolved) == {"window_pages": pages}
    assert term(sizes(model), "state", 3) == 3 * pages * PAGE * row * 2
    assert sizes(model, "cpu").page_bytes == 2 * PAGE * row * 4
    assert not sizes(model, "cpu").resolved


def test_layers_that_borrow_keys_or_a_selection_keep_nothing() -> None:
    index = IndexSpec("tokens", heads=4, dim=64, keep=64, rope="main", reuse=0)
    borrowed = kept_by(replace(attention(8, 2, 64), kv_from=0), CARD)
    reusing = kept_by(replace(attention(8, 2, 64), index=index), CARD)
    assert borrowed is not None and borrowed.page == 0
    assert reusing == kept_by(attention(8, 2, 64), CARD)


# ── every line, work, and what is not known ─────────────────────────────────────────────────────────────────────────
def test_a_card_has_every_line_and_scales_them_with_requests() -> None:
    found = sizes(QWEN3_6)
    lines = {one.line for one in found.terms}
    assert lines == {
        "weights",
        "state",
        "snapshots",
        "attention_workspace",
        "logits",
        "graphs",
        "allocator",
        "cuda_context",
        "cpu_staging",
    }
    assert term(found, "attention_workspace") == 256 * MIB
    assert term(found, "logits", 4) == 4 * 2 * 248_320 * 4
    assert term(found, "graphs", 4) == 4 * term(found, "graphs", 1) > 0
    assert found.host


def test_a_token_reads_what_it_uses() -> None:
    """Qwen3-30B-A3B has 3.3 billion active parameters, its embedding's rows not among them."""
    found = sizes(QWEN3_30B)
    assert found.work.params / 1e9 == pytest.approx(3.35 - 0.31, rel=0.02)
    assert found.work.expert_params == 48 * 8 * 3 * 2048 * 768
    alone = sizes(QWEN3_30B, "cpu").work.read_bytes
    assert alone - found.work.read_bytes == 2 * found.work.expert_params


@dataclass(frozen=True, slots=True)
class Convolution:
    """A mixer of tomorrow."""

    rope: str | None = None


def test_what_is_not_known_is_named_and_no_figure_is_made_up() -> None:
    odd = replace(layer(attention(8, 2, 64)), mixer=Convolution())  # type: ignore[arg-type]
    found = sizes(spec(512, (layer(attention(8, 2, 64)), odd)))
    assert found.unknown == ("the mixer Convolution",)
    assert sizes(replace(QWEN3_30B, max_positions=0)).unknown == ("the trained window",)
    streams = replace(QWEN3_30B, residual=Convolution())  # type: ignore[arg-type]
    assert sizes(streams).unknown == ("the residual Convolution",)
    plan = make_plan(opened(streams), Requested(), Machine(Bytes(64 * GIB), Bytes(64 * GIB), 1))
    assert plan.verdict == "cannot_estimate"
    assert plan.code == "CANNOT_ESTIMATE"


def test_an_n_gram_table_is_not_known() -> None:
    inject = NGram(order=0, dim=64, ngram=2, heads=2, base=101, pad=8, seed=1, conv=4, eos=0, norm=NORM)
    found = sizes(spec(512, (replace(layer(attention(8, 2, 64)), inject=inject),)))
    assert found.unknown == ("the table of the injection NGram",)


def test_known_models_have_nothing_unknown() -> None:
    for name in PUBLISHED:
        found = sizes(spec(2048, tuple(layer(mixer) for mixer in mixers(name))))
        assert not found.unknown
        assert found.transient(8192, 32_768) > 0
        assert not any(isinstance(mixer, Attention) and mixer.kv_from for mixer in mixers(name))
