"""open_checkpoint on real files of every family, and on every way in which they can be wrong."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken.catalog.checkpoint import Checkpoint, open_checkpoint
from freetoken.catalog.expected import expected
from freetoken.core import errors
from tests.fakes import checkpoint as fake
from tests.fakes.replay import read_all

torch.set_num_threads(1)
Make = Callable[[str], Path]


# ── what is right ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("family", fake.FAMILIES)
def test_the_spec_alone_names_the_tensors_of_the_files(family: str, tiny_folder: Make) -> None:
    checkpoint = open_checkpoint(tiny_folder(family))
    tensors = read_all(checkpoint)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected(checkpoint.spec)
    assert (checkpoint.family, checkpoint.format, checkpoint.dtype) == (fake.FAMILIES[family][0], "safetensors", "F32")
    assert (checkpoint.bos_id, checkpoint.eos_ids) == (fake.BOS, (fake.EOS,))


@pytest.mark.parametrize("family", fake.FAMILIES)
def test_every_number_of_the_model_arrives_once(family: str, tiny_folder: Make) -> None:
    """The canonical tensors hold what transformers' model holds: the same multiset of sums, whatever the names."""
    tensors = read_all(open_checkpoint(tiny_folder(family)))
    saved: dict[str, torch.Tensor] = {}
    for file in tiny_folder(family).glob("*.safetensors"):
        saved |= load_file(file)
    total = sum(tensor.numel() for tensor in saved.values())
    assert sum(tensor.numel() for tensor in tensors.values()) == total
    sums = [sum(float(t.double().sum()) for t in some.values()) for some in (saved, tensors)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)


def test_names_lead_to_the_modules_that_they_say(tiny_folder: Make) -> None:
    model, tensors = fake.build("qwen3_moe"), read_all(open_checkpoint(tiny_folder("qwen3_moe")))
    layer = model.model.layers[2]
    for name, parameter in {
        "embed.weight": model.model.embed_tokens.weight,
        "head.weight": model.lm_head.weight,
        "head.norm.weight": model.model.norm.weight,
        "layers.2.pre_mixer.weight": layer.input_layernorm.weight,
        "layers.2.pre_ffn.weight": layer.post_attention_layernorm.weight,
        "layers.2.mixer.q.weight": layer.self_attn.q_proj.weight,
        "layers.2.mixer.o.weight": layer.self_attn.o_proj.weight,
        "layers.2.mixer.k_norm.weight": layer.self_attn.k_norm.weight,
        "layers.2.ffn.experts.router.weight": layer.mlp.gate.weight,
        "layers.1.ffn.dense.up.weight": model.model.layers[1].mlp.up_proj.weight,
        "layers.2.ffn.experts.5.gate.weight": layer.mlp.experts.gate_up_proj[5, :32],
        "layers.2.ffn.experts.5.up.weight": layer.mlp.experts.gate_up_proj[5, 32:],
        "layers.2.ffn.experts.5.down.weight": layer.mlp.experts.down_proj[5],
    }.items():
        assert torch.equal(tensors[name], parameter.detach()), name


@pytest.mark.parametrize("family", fake.GGUF_FAMILIES)
def test_a_gguf_is_the_same_model(family: str, tiny_file: Make, tmp_path: Path) -> None:
    """Spec and every number of the GGUF, after its steps, equal those of the folder."""
    from_gguf = open_checkpoint(tiny_file(family))
    sayable: dict[str, Any] = dict(fake.SAYABLE.get(family, {}))
    if family == "llama":
        sayable["vocab_size"] = len(fake.vocabulary()[0])
    folder = open_checkpoint(fake.tiny(family, tmp_path, **sayable))
    assert from_gguf.format == "gguf"
    one, other = read_all(from_gguf), read_all(folder)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert _facts(from_gguf) == _facts(folder)


def _facts(checkpoint: Checkpoint) -> object:
    """What the spec says besides rounding: GGUF keeps eps and theta as fp32, and Llama 3's scaling as divisors."""
    spec = checkpoint.spec
    mixer = spec.layers[-1].mixer
    return (
        (spec.hidden, len(spec.layers), spec.embed, spec.head.tied, spec.max_positions),
        (mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.window, mixer.qkv_bias, mixer.o_bias),  # type: ignore[union-attr]
        [(branch.name, branch.body) for layer in spec.layers for branch in layer.ffn],
        (round(spec.ropes["main"].theta), spec.ropes["main"].dim, spec.ropes["main"].attn_factor),
        spec.layers[0].pre_mixer is not None and round(spec.layers[0].pre_mixer.eps, 6),
    )


def test_a_gguf_with_one_tensor_an_expert_equals_the_packed_one(tiny_file: Make, tmp_path: Path) -> None:
    old = read_all(open_checkpoint(fake.tiny_gguf("mixtral", tmp_path / "old.gguf", packed=False)))
    new = read_all(open_checkpoint(tiny_file("mixtral")))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_llama3_divisors_give_the_frequencies_of_the_configuration(tiny_file: Make) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = open_checkpoint(tiny_file("llama3")).spec.ropes["main"]
    theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](fake.build("llama3").config, torch.device("cpu"))
    assert rope.scaling is not None
    assert rope.scaling.short == rope.scaling.long
    exponents = torch.arange(0, rope.dim, 2) / rope.dim
    ours = 1 / (torch.tensor(rope.scaling.short) * rope.theta**exponents)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert rope.attn_factor == factor


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_gguf_type_is_opened_with_its_sizes(quant: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(fake.tiny_gguf("qwen3", tmp_path / "q.gguf", quant=quant))
    assert checkpoint.dtype == quant
    part = checkpoint.tensors["layers.0.mixer.o.weight"].parts[0].tensor
    bits = {"F16": 16, "BF16": 16, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5}[quant]
    assert part.size == 64 * 128 * bits / 8


def test_packed_experts_equal_separate_ones(tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("qwen3_moe"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    for layer in (0, 2, 3):
        prefix = f"model.layers.{layer}.mlp.experts."
        take = {
            kind: torch.stack([weights.pop(f"{prefix}{e}.{kind}_proj.weight") for e in range(8)])
            for kind in ("gate", "up", "down")
        }
        weights[f"{prefix}gate_up_proj"] = torch.cat((take["gate"], take["up"]), 1)
        weights[f"{prefix}down_proj"] = take["down"]
    save_file(weights, folder / "model.safetensors")
    one, other = read_all(open_checkpoint(folder)), read_all(open_checkpoint(tiny_folder("qwen3_moe")))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_folder_with_one_gguf_is_that_gguf(tiny_file: Make, tmp_path: Path) -> None:
    shutil.copy(tiny_file("qwen3"), tmp_path / "model.gguf")
    assert open_checkpoint(tmp_path).text.path == tmp_path / "model.gguf"


def test_the_tokenizer_and_generation_settings_are_found(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(fake.tiny("llama", tmp_path, tokenizer=True))
    assert checkpoint.sampling_defaults == {k: v for k, v in fake.GENERATION.items() if k != "do_sample"}
    assert (checkpoint.text.kind, checkpoint.text.path) == ("hf", tmp_path)
    assert checkpoint.eos_ids == (fake.EOS,)


def test_a_stored_inv_freq_and_a_stored_tied_head_are_left_out(tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("llama_tied"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors.keys() == expected(checkpoint.spec).keys()


def test_sixty_shards_of_a_large_mixture_open(tmp_path: Path) -> None:
    """24 layers of 128 experts: 9 435 tensors, here of a few numbers each."""
    config = json.loads((fake.tiny("qwen3_moe", tmp_path / "small") / "config.json").read_text())
    config |= {"num_hidden_layers": 24, "num_experts": 128, "hidden_size": 8, "moe_intermediate_size": 2, "head_dim": 2}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 4, "mlp_only_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = _empty_qwen3_moe(24, 128)
    weight_map = {}
    for shard in range(60):
        name = f"model-{shard + 1:05d}-of-00060.safetensors"
        part = {key: weights[key] for key in list(weights)[shard::60]}
        save_file(part, tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(open_checkpoint(tmp_path).tensors) == 3 + 24 * (8 + 1 + 3 * 128)


def _empty_qwen3_moe(layers: int, experts: int) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (4, 8), "lm_head": (4, 8), "model.norm": (8,)}
    for layer in (f"model.layers.{number}." for number in range(layers)):
        shapes |= {layer + "input_layernorm": (8,), layer + "post_attention_layernorm": (8,)}
        shapes |= {f"{layer}self_attn.{x}_proj": (2, 8) for x in "qkv"} | {layer + "self_attn.o_proj": (8, 2)}
        shapes |= {f"{layer}self_attn.{x}_norm": (2,) for x in "qk"} | {layer + "mlp.gate": (experts, 8)}
        for expert in (f"{layer}mlp.experts.{number}." for number in range(experts)):
            shapes |= {expert + "gate_proj": (2, 8), expert + "up_proj": (2, 8), expert + "down_proj": (8, 2)}
    return {name + ".weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


# ── what is wrong ───────────────────────────────────────────────────────────────────────────────────────────────────
def _copy(folder: Path, to: Path) -> Path:
    return shutil.copytree(folder, to / "copy")


def _edit(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def _reason(path: Path, kind: type[errors.CheckpointError]) -> str:
    with pytest.raises(errors.CheckpointError) as raised:
        open_checkpoint(path)
    assert type(raised.value) is kind, raised.value.detail
    return raised.value.detail


def test_a_missing_folder_and_a_missing_config(tmp_path: Path) -> None:
    assert "does not exist" in _reason(tmp_path / "nowhere", errors.ConfigMissing)
    assert "config.json" in _reason(tmp_path, errors.ConfigMissing)


def test_several_gguf_files_in_a_folder(tiny_file: Make, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(tiny_file("qwen3"), tmp_path / name)
    assert "2 .gguf files" in _reason(tmp_path, errors.ConfigMissing)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "no GGUF" in _reason(tmp_path / "notes.txt", errors.ConfigInvalid)


@pytest.mark.parametrize(
    "change", [{"model_type": "gpt_bigcode"}, {"architectures": ["LlamaForSequenceClassification"]}]
)
def test_an_unknown_architecture_lists_those_supported(
    change: dict[str, Any], tiny_folder: Make, tmp_path: Path
) -> None:
    folder = _copy(tiny_folder("llama"), tmp_path)
    _edit(folder, **change)
    assert "qwen3_moe" in _reason(folder, errors.UnsupportedArchitecture)


def test_an_unknown_gguf_architecture(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "deepseek4")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'deepseek4'" in _reason(tmp_path / "x.gguf", errors.UnsupportedArchitecture)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 0},
        {"hidden_size": "64"},
        {"hidden_size": 10**400},
        {"num_hidden_layers": 10**9},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": 10**400},
        {"rms_norm_eps": ...},
        {"num_key_value_heads": 3},
        {"hidden_act": "gelu"},
        {"head_dim": 15},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_parameters": "default"},
        {"tie_word_embeddings": "no"},
        {"eos_token_id": [1, "2"]},
    ],
    ids=str,
)
def test_a_configuration_that_means_nothing(change: dict[str, Any], tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("llama"), tmp_path)
    (folder / "generation_config.json").unlink()
    _edit(folder, **change)
    reason = _reason(folder, errors.ConfigInvalid)
    assert len(reason) < 300


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"a": 1, "a": 2}', "{" * 100_000, '{"a": ' + "[" * 100_000, "\xff"])
def test_a_config_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    _reason(tmp_path, errors.FileCorrupt)


def test_mistral_has_to_say_whether_it_slides(tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("mistral"), tmp_path)
    _edit(folder, sliding_window=...)
    assert "lacks sliding_window" in _reason(folder, errors.ConfigInvalid)
    _edit(folder, sliding_window=None)
    assert open_checkpoint(folder).spec.layers[0].mixer.window is None  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [{"num_hidden_layers": 5}, {"num_hidden_layers": 3}, {"vocab_size": 161}])
def test_a_configuration_of_another_model(change: dict[str, Any], tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("llama"), tmp_path)
    _edit(folder, **change)
    reason = _reason(folder, errors.TensorMismatch)
    assert "expected" in reason
    assert reason.count(";") <= 5


def test_more_experts_than_any_file_holds_is_found_without_listing_them(tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("qwen3_moe"), tmp_path)
    _edit(folder, num_experts=65536, num_hidden_layers=4000)
    start = time.process_time()
    assert "65536" not in _reason(folder, errors.TensorMismatch)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("where", ["config", "file"])
def test_quantised_weights_are_refused_by_name(where: str, tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("llama"), tmp_path)
    if where == "config":
        _edit(folder, quantization_config={"quant_method": "awq", "bits": 4})
        assert "'awq'" in _reason(folder, errors.UnsupportedEncoding)
    else:
        (folder / "hf_quant_config.json").write_text("{}")
        assert "BF16" in _reason(folder, errors.UnsupportedEncoding)


def test_a_stored_type_that_cannot_be_decoded(tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("llama"), tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors")
    reason = _reason(folder, errors.UnsupportedEncoding)
    assert "lm_head.weight" in reason
    assert "F8_E4M3" in reason


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"top_p": 1.5}, {"top_k": "many"}, {"repetition_penalty": 0}, {"do_sample": 1}]
)
def test_generation_settings_that_mean_nothing(values: dict[str, Any], tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("llama"), tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert "generation_config.json" in _reason(folder, errors.ConfigInvalid)


def test_an_author_who_decodes_greedily(tiny_folder: Make, tmp_path: Path) -> None:
    folder = _copy(tiny_folder("llama"), tmp_path)
    values = {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.2, "top_k": -1}
    (folder / "generation_config.json").write_text(json.dumps(values))
    assert open_checkpoint(folder).sampling_defaults == {"temperature": 0.0, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps({"top_k": -1, "min_p": 0.05, "top_p": None}))
    assert open_checkpoint(folder).sampling_defaults == {"top_k": 0, "min_p": 0.05, "top_p": 1.0}
