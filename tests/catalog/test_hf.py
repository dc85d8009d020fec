"""config.json: both dialects mean the same, and rope parameters give transformers' frequencies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from freetoken.catalog.families.table import find_family
from freetoken.catalog.hf import Config, rope_spec
from freetoken.catalog.spec import ModelSpec, RopeSpec
from freetoken.core.errors import ConfigInvalid
from tests.fakes import checkpoint as fake

torch.set_num_threads(1)
WINDOW = 4096


def saved(family: str, **overrides: Any) -> dict[str, Any]:
    """The configuration as transformers 5 writes it."""
    from transformers import AutoConfig

    model_type, extra = fake.FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**fake.BASE, **extra, **overrides})
    return dict(config.to_dict())


def original(config: dict[str, Any]) -> dict[str, Any]:
    """The same in the dialect of the models' first files."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config.pop("layer_types", None)
    return config


def read(config: dict[str, Any]) -> ModelSpec:
    family, text = find_family(Config(config))
    return family.read(text)[0]


@pytest.mark.parametrize("family", fake.FAMILIES)
def test_both_dialects_give_one_spec(family: str) -> None:
    config = saved(family)
    assert read(config) == read(original(config))


def test_a_multimodal_wrapper_is_read_through_its_text_config() -> None:
    text = saved("mistral")
    wrapper = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {key: value for key, value in text.items() if key != "tie_word_embeddings"},
        "tie_word_embeddings": True,
    }
    assert read(wrapper).head.tied
    assert read(wrapper).layers == read(text).layers


@pytest.mark.parametrize(
    ("window", "layers", "expected"),
    [
        ({"use_sliding_window": False}, 3, [None] * 3),
        ({"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}, 3, [None, 7, 7]),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}, 2, [7, None]),
    ],
)
def test_windows_of_qwen(window: dict[str, Any], layers: int, expected: list[int | None]) -> None:
    config = saved("qwen2", num_hidden_layers=layers)
    config |= {"sliding_window": 7, **window}
    assert [layer.mixer.window for layer in read(config).layers] == expected  # type: ignore[union-attr]


def test_layer_types_of_another_length_are_refused() -> None:
    config = saved("qwen3") | {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["full_attention"]}
    with pytest.raises(ConfigInvalid, match="4 of full_attention"):
        read(config)


@pytest.mark.parametrize("key", ["head_dim", "norm_topk_prob", "moe_intermediate_size", "num_experts_per_tok"])
def test_what_only_the_file_can_know_is_needed(key: str) -> None:
    config = saved("qwen3_moe")
    del config[key]
    with pytest.raises(ConfigInvalid, match=key):
        read(config)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        fake.LLAMA3,
        YARN,
        {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
        {**YARN, "mscale": 0.7},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "factor": None},
        {**fake.LONGROPE, "original_max_position_embeddings": 1024, "factor": 4.0},
        {**fake.LONGROPE, "original_max_position_embeddings": 1024},
    ],
    ids=str,
)
def test_frequencies_and_attention_factor_are_those_of_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": WINDOW, "rope_parameters": rope}
    ours = rope_spec(Config(values), 16)
    config = LlamaConfig(**{**values, "rope_parameters": {"rope_theta": 10000.0, **rope}})
    if rope["rope_type"] == "default":
        theirs, factor = 10000.0 ** (-torch.arange(0, 16, 2) / 16), 1.0
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(frequencies(ours), theirs.float(), rtol=2e-6, atol=0)
    assert ours.attn_factor == pytest.approx(factor, rel=1e-12)


def frequencies(rope: RopeSpec) -> torch.Tensor:
    """The formulas that RopeScaling's fields stand for, from the papers; (dim / 2) f32."""
    import math

    i = torch.arange(0, rope.dim, 2) / rope.dim
    f = rope.theta**-i
    scaling = rope.scaling
    if scaling is None:
        return f
    if scaling.kind == "linear":
        return f / scaling.factor
    if scaling.kind == "longrope":
        return f / torch.tensor(scaling.short)
    if scaling.kind == "llama3":
        turns = scaling.original * f / (2 * math.pi)
        smooth = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        return (1 - smooth) * f / scaling.factor + smooth * f

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2) - low) / (high - low)).clamp(0, 1)
    return f / scaling.factor * ramp + f * (1 - ramp)
