"""The two tests of the first day: the spec alone says what is built, and no field of it is decoration. And a decoy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.catalog.checkpoint import Checkpoint, open_checkpoint
from freetoken.catalog.expected import expected
from freetoken.catalog.names import MappedTensor
from freetoken.catalog.spec import (
    Attention,
    Branch,
    Dense,
    EmbeddingSpec,
    GatedStreams,
    GluSpec,
    HeadSpec,
    Latent,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Plain,
    RopeSpec,
    Routed,
    Router,
)
from freetoken.core.errors import ConfigInvalid, FreeTokenError, UnsupportedArchitecture
from freetoken.engine.kv.layouts import allocate
from freetoken.engine.load.pipeline import load, verify
from freetoken.engine.load.sinks import ResidentSink
from freetoken.engine.models.build import Model, build
from freetoken.engine.runner.runner import Runner
from tests.fakes.checkpoint import FAMILIES, VOCAB, tiny
from tests.fakes.driver import PAGE, Driver

torch.set_num_threads(1)

PROMPT = torch.randint(4, VOCAB, (37,), generator=torch.Generator().manual_seed(3)).tolist()


def _driver(model: Model) -> Driver:
    caches = [allocate(layer.mixer, 64, PAGE) for layer in model.spec.layers]
    return Driver(Runner(model, caches, PAGE), pages=64)


def _logits(model: Model) -> torch.Tensor:
    driver = _driver(model)
    return driver.logits(driver.sequence(PROMPT))


def _filled(spec: ModelSpec, seed: int = 1) -> Model:
    """A model of `spec` with random weights that depend on their names only."""
    model = build(spec, weight_dtype="float32", context=512)
    for name, view in model.destinations.items():
        noise = torch.randn(view.shape, generator=torch.Generator().manual_seed(seed + sum(map(ord, name))))
        if "norm" in name or "pre_" in name or "post_" in name:
            view.copy_(1 + 0.3 * noise)
        elif name.endswith("table"):
            view.copy_(torch.argsort(noise[:, :1] * torch.arange(1, view.shape[1] + 1), -1))
        elif name.endswith("choice_bias"):
            view.copy_(0.4 * noise - 1)  # all negative: a mask of 0 instead of -inf would choose the masked
        else:
            view.copy_(noise * (1.3 / view.shape[-1] ** 0.5 if view.dim() > 1 else 0.5))
    return model


# A model that no family is: every field that this build computes, away from its default.
_NORM = NormSpec(0.02)
_ATTENTION = Attention(
    heads=4,
    kv_heads=2,
    head_dim=16,
    rope="main",
    scale=0.3,
    window=9,
    qkv_bias=True,
    o_bias=True,
    qk_norm=NormSpec(0.02),
    qk_norm_scope="all",
    v_norm=NormSpec(0.02, weight=False),
    clip=0.8,
    sinks=True,
    out_gate=True,
)
_ROUTER = Router(
    experts=8,
    top_k=2,
    score="sigmoid",
    renorm=False,
    scale=1.5,
    choice_bias=True,
    groups=4,
    groups_kept=2,
    bias=True,
    norm=NormSpec(0.02),
    logit_scale=0.7,
    expert_scale=True,
)
_GLU = GluSpec(alpha=1.702, limit=0.8, up_shift=1.0)
_LAYER = LayerSpec(
    mixer=_ATTENTION,
    ffn=(
        Branch("dense", Dense(48, GluSpec("gelu_tanh"), bias=True), norm_out=_NORM),
        Branch("experts", Routed(_ROUTER, 32, _GLU, bias=True), "residual", norm_in=_NORM, norm_out=_NORM),
        Branch("shared", Dense(24), gated=True),
    ),
    pre_mixer=_NORM,
    pre_ffn=NormSpec(0.02, kind="layer"),
    post_mixer=_NORM,
    post_ffn=NormSpec(0.02, group=16),
    out_scale=True,
)
_VARIANT = replace(
    _LAYER,
    mixer=replace(_ATTENTION, qk_norm_scope="head", v_is_k=True, window=None, sinks=False, rope="tail"),
    ffn=(Branch("experts", Routed(replace(_ROUTER, score="sqrtsoftplus", groups=1, groups_kept=1), 32)),),
)
EVERYTHING = ModelSpec(
    hidden=64,
    layers=(_LAYER, _VARIANT),
    embed=EmbeddingSpec(VOCAB, scale=3.0),
    head=HeadSpec(tied=True, norm=_NORM, divisor=0.5, softcap=5.0),
    ropes={
        "main": RopeSpec(1e4, 8, pairs=1, attn_factor=1.3),
        "tail": RopeSpec(1e4, 12, interleaved=True, tail=True),
    },
    residual=Plain(0.4),
)


def _non_defaults(value: Any) -> Iterator[tuple[str, str]]:
    """(class, field) of every field inside `value` that has a default and another value."""
    if is_dataclass(value):
        for field in fields(value):
            inner = getattr(value, field.name)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if default is not MISSING and inner != default:
                yield type(value).__name__, field.name
            yield from _non_defaults(inner)
    elif isinstance(value, tuple | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _non_defaults(inner)


def _reset(value: Any, kind: str, name: str) -> Any:
    """`value` with every `kind.name` inside it at its default."""
    if is_dataclass(value):
        changed = {field.name: _reset(getattr(value, field.name), kind, name) for field in fields(value)}
        if type(value).__name__ == kind:
            changed[name] = next(field.default for field in fields(value) if field.name == name)
        return replace(value, **changed)  # type: ignore[type-var]
    if isinstance(value, dict):
        return {key: _reset(inner, kind, name) for key, inner in value.items()}
    return tuple(_reset(inner, kind, name) for inner in value) if isinstance(value, tuple) else value


_UNSEEN = {  # not arithmetic, or reset inside
    ("ModelSpec", "max_positions"),
    ("ModelSpec", "ropes"),
    ("ModelSpec", "residual"),
    ("RopeScaling", "long"),  # read beyond the original context only
}


def _movement(spec: ModelSpec, kind: str, name: str, rebuilt: Any, reference: torch.Tensor) -> float:
    """How far the logits move when the field is reset; infinite where that cannot be built or loaded."""
    try:
        moved = float((_logits(rebuilt(_reset(spec, kind, name))) - reference).abs().max())
    except (FreeTokenError, TypeError, ValueError, KeyError, RuntimeError):
        return float("inf")  # the field changes names or shapes, so it cannot go unnoticed
    return moved if moved == moved else float("inf")


def _still(spec: ModelSpec, rebuilt: Any) -> list[tuple[str, str, float]]:
    reference = _logits(rebuilt(spec))
    found = []
    for kind, name in dict.fromkeys(_non_defaults(spec)):
        if (kind, name) not in _UNSEEN and (moved := _movement(spec, kind, name, rebuilt, reference)) < 1e-3:
            found.append((kind, name, moved))
    return found


def test_every_field_of_everything_moves_logits() -> None:
    assert len(set(_non_defaults(EVERYTHING))) > 35
    assert _still(EVERYTHING, _filled) == []


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in ("llama3", "mixtral") else pytest.mark.slow) for f in FAMILIES]
)
def test_names_and_fields_of_families(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny(family, tmp_path))
    model = _loaded(checkpoint, checkpoint.spec)
    shapes = {name: tuple(view.shape) for name, view in model.destinations.items()}
    assert shapes == expected(checkpoint.spec)
    assert _still(checkpoint.spec, lambda spec: _loaded(checkpoint, spec)) == []


def _loaded(checkpoint: Checkpoint, spec: ModelSpec) -> Model:
    model = build(spec, weight_dtype="float32", context=512)
    verify(checkpoint.tensors, model.destinations)
    load(checkpoint.tensors, ResidentSink(model.destinations), lambda *_: None, lambda: False)
    return model


def test_names_of_everything_are_the_catalogs() -> None:
    shapes = {name: tuple(view.shape) for name, view in _filled(EVERYTHING).destinations.items()}
    assert shapes == expected(EVERYTHING)


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_is_not_built_is_named() -> None:
    latent = Latent(4, None, 8, 8, 8, 8, "main", 1.0)
    spec = replace(EVERYTHING, layers=(_LAYER, replace(_LAYER, mixer=latent)), residual=GatedStreams(2, 4, _NORM))
    with pytest.raises(UnsupportedArchitecture, match=r"Latent.*GatedStreams"):
        build(spec, weight_dtype="float32", context=512)


def test_a_spec_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="rope"):
        build(replace(EVERYTHING, ropes={}), weight_dtype="float32", context=512)


# ── decoy ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _with_decoy(spec: ModelSpec) -> ModelSpec:
    """One expert more in every layer, and a router bias to keep it in or out."""

    def grown(branch: Branch) -> Branch:
        assert isinstance(branch.body, Routed)
        router = replace(branch.body.router, experts=branch.body.router.experts + 1, bias=True)
        return replace(branch, body=replace(branch.body, router=router))

    return replace(
        spec, layers=tuple(replace(layer, ffn=tuple(grown(branch) for branch in layer.ffn)) for layer in spec.layers)
    )


@pytest.mark.parametrize("top_k", [2, 8])
def test_a_decoy_expert_changes_tokens_only_when_biased_in(
    top_k: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tiny("mixtral", tmp_path_factory.mktemp("decoy"), num_experts_per_tok=top_k)
    checkpoint = open_checkpoint(folder)
    plain, grown = checkpoint.spec, _with_decoy(checkpoint.spec)
    assert expected(grown).keys() - expected(plain).keys() == {
        f"layers.{i}.ffn.experts.{name}"
        for i in range(4)
        for name in ("router.bias", "8.gate.weight", "8.up.weight", "8.down.weight")
    }
    outputs = []
    for bias in (None, -1e4, 1e4):
        model = build(plain if bias is None else grown, weight_dtype="float32", context=512)
        _fill_with_decoy(model, checkpoint, 0.0 if bias is None else bias)
        driver = _driver(model)
        outputs.append(driver.generate([driver.sequence(PROMPT)], 24)[0])
        if bias is not None:
            decoy = [layer[-1] for layer in driver.runner.expert_tokens()]
            assert decoy == ([37 + 23] * 3 + [24] if bias > 0 else [0] * 4)
    assert outputs[0] == outputs[1] != outputs[2]


def _fill_with_decoy(model: Model, checkpoint: Checkpoint, bias: float) -> None:
    """The checkpoint's weights; the decoy's are random, its router row zero and its logit `bias`."""
    sink: dict[str, torch.Tensor] = {}
    found: dict[str, MappedTensor] = {}
    for name, view in model.destinations.items():
        if name.endswith("router.bias"):
            view.zero_()[8] = bias
        elif ".experts.8." in name:
            view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(0)))
        else:
            sink[name] = view.zero_()[:8] if name.endswith("router.weight") else view
            found[name] = checkpoint.tensors[name]
    load(found, ResidentSink(sink), lambda *_: None, lambda: False)


def test_every_step_is_counted_by_expert(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("mixtral", tmp_path))
    driver = _driver(_loaded(checkpoint, checkpoint.spec))
    driver.generate([driver.sequence(PROMPT)], 5, chunk=7)
    counts = driver.runner.expert_tokens()
    assert [len(layer) for layer in counts] == [8] * 4
    assert [sum(layer) for layer in counts] == [2 * (37 + 4)] * 3 + [2 * 5]  # the last layer: sampled tokens only
