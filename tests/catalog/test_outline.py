"""outline: what can be said of a checkpoint of which only a part is here, and that it is checked as far as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from freetoken.catalog.checkpoint import Checkpoint, open_checkpoint
from freetoken.catalog.outline import outline
from freetoken.catalog.safetensors import INDEX
from freetoken.core import errors
from tests.bench import plan_speed
from tests.fakes import checkpoint as fake

Make = Callable[[str], Path]


def facts(checkpoint: Checkpoint) -> Checkpoint:
    """Everything that planning and people see, without where tensors are."""
    return replace(checkpoint, tensors={}, notes=())


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return fake.tiny("qwen3_moe", tmp_path / "sharded", sharded=True, mlp_only_layers=[])


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def behead(file: Path) -> None:
    """Leave a file's header, and a byte of its data."""
    raw = file.read_bytes()
    file.write_bytes(raw[: 9 + int.from_bytes(raw[:8], "little")])


# ── what is there ───────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("family", fake.FAMILIES)
def test_whole_files_give_what_opening_gives(family: str, tiny_folder: Make) -> None:
    folder = tiny_folder(family)
    found, opened = outline(folder), open_checkpoint(folder)
    # the sizes differ by the index's own idea of them only where files have gaps, which is none
    assert facts(found) == facts(opened)
    assert all(opened.tensors[name] == tensor for name, tensor in found.tensors.items())
    assert found.notes[0].startswith("sizes from the headers of")
    assert "not whole" not in found.notes[0]
    assert not opened.notes


def test_layers_that_are_alike_are_looked_at_once(sharded: Path) -> None:
    found = outline(sharded).tensors
    assert {name.split(".")[1] for name in found if name.startswith("layers.")} == {"0"}
    assert {"embed.weight", "head.weight", "layers.0.ffn.experts.7.down.weight"} <= found.keys()


def test_headers_are_enough(sharded: Path) -> None:
    before = facts(open_checkpoint(sharded))
    for file in shards(sharded)[1:]:
        behead(file)
    found = outline(sharded)
    assert facts(found) == before
    count = len(shards(sharded))
    assert found.notes == (f"sizes from the headers of {count} weight files, {count - 1} of which are not whole",)
    with pytest.raises(errors.FileCorrupt, match="truncated"):
        open_checkpoint(sharded)


def test_an_index_without_files_is_enough(sharded: Path) -> None:
    before = open_checkpoint(sharded)
    total = json.loads((sharded / INDEX).read_text())["metadata"]["total_size"]
    for file in shards(sharded)[1:]:
        file.unlink()
    count = len(set(json.loads((sharded / INDEX).read_text())["weight_map"].values()))
    found = outline(sharded)
    assert facts(found) == replace(facts(before), bytes_on_disk=total)
    assert found.notes == (
        f"sizes from config.json alone: of the weight files 1 of {count} are here; config.json says F32",
    )
    with pytest.raises(errors.WeightsMissing):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("said", "dtype", "says"),
    [
        ({"dtype": "float16"}, "F16", "config.json says F16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "BF16", "config.json says BF16"),
        ({"dtype": None}, "BF16", "BF16 is assumed, config.json does not say"),
    ],
)
def test_a_configuration_alone_is_enough(said: dict[str, Any], dtype: str, says: str, sharded: Path) -> None:
    spec = open_checkpoint(sharded).spec
    for file in (*shards(sharded), sharded / INDEX):
        file.unlink()
    edit(sharded / "config.json", **said)
    found = outline(sharded)
    assert (found.spec, found.dtype, found.tensors, found.bytes_on_disk) == (spec, dtype, {}, 0)
    assert found.notes == (f"sizes from config.json alone: of the weight files none are here; {says}",)


def test_numbered_files_without_an_index_count_as_missing(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    count = len(shards(sharded))
    shards(sharded)[0].unlink()
    assert f"{count - 1} of {count} are here" in outline(sharded).notes[0]


def test_a_gguf_cut_off_after_its_header(tiny_file: Make, tmp_path: Path) -> None:
    whole = tiny_file("qwen3")
    before = outline(whole)
    assert replace(before, notes=()) == open_checkpoint(whole)
    assert not before.notes
    cut = tmp_path / whole.name
    cut.write_bytes(whole.read_bytes()[:-70_000])
    found = outline(cut)
    assert (found.spec, found.dtype, len(found.tensors)) == (before.spec, before.dtype, len(before.tensors))
    assert "68.36 KiB of its weights are not here" in found.notes[0]
    with pytest.raises(errors.FileCorrupt, match="truncated"):
        open_checkpoint(cut)


def test_a_gguf_cut_off_in_its_header_is_refused(tiny_file: Make, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_file("qwen3").read_bytes()[:400])
    with pytest.raises(errors.FileCorrupt):
        outline(cut)


# ── what is wrong is refused as by open_checkpoint ──────────────────────────────────────────────────────────────────
Spoil = Callable[[dict[str, Any]], object]
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
SPOILT: dict[str, tuple[Spoil, str]] = {
    "missing in a later layer": (lambda w: w.pop(EXPERT), "is missing"),
    "wrong shape in a later layer": (lambda w: w.update({EXPERT: w[EXPERT][:-1].clone()}), "has shape"),
    "a tensor too many": (lambda w: w.update({"model.layers.3.odd": w[EXPERT].clone()}), "not expected"),
    "a layer too many": (lambda w: w.update({"model.layers.4.odd": w[EXPERT].clone()}), "not expected"),
    "outside layers": (lambda w: w.update({"odd": w[EXPERT].clone()}), "not expected"),
    "a layer of another number": (lambda w: w.update({EXPERT.replace(".2.", ".02."): w.pop(EXPERT)}), "missing"),
    "no layer at all": (lambda w: [w.pop(name) for name in list(w) if ".layers.3." in name], "missing|the files hold"),
}


@pytest.mark.parametrize("what", SPOILT)
@pytest.mark.parametrize("look", [outline, open_checkpoint])
def test_files_that_are_not_the_model(look: Callable[[Path], Checkpoint], what: str, tmp_path: Path) -> None:
    spoil, says = SPOILT[what]
    folder = fake.tiny("qwen3_moe", tmp_path, mlp_only_layers=[])
    weights = load_file(folder / "model.safetensors")
    spoil(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(errors.TensorMismatch, match=says):
        look(folder)


def test_another_dtype_in_one_layer_is_seen(tmp_path: Path) -> None:
    folder = fake.tiny("qwen3_moe", tmp_path, mlp_only_layers=[])
    weights = load_file(folder / "model.safetensors")
    weights[EXPERT] = weights[EXPERT].double()
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(errors.UnsupportedEncoding, match="F64"):
        outline(folder)


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    first, second = shards(sharded)[:2]
    weights = load_file(first)
    save_file({**load_file(second), **dict([weights.popitem()])}, second)
    with pytest.raises(errors.FileCorrupt, match="another file"):
        outline(sharded)


def test_an_index_that_promises_more_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    edit(sharded / INDEX, weight_map={**index, "model.layers.0.ghost": shards(sharded)[0].name})
    with pytest.raises(errors.FileCorrupt, match="ghost"):
        outline(sharded)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "plain file name"),
        ('{"weight_map": {"a": 7}}', "plain file name"),
        ("{", "not valid JSON"),
    ],
)
def test_an_index_that_lies(index: str, says: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(errors.FileCorrupt, match=says):
        outline(sharded)


HEADERS = {
    "empty": b"",
    "too short for a length": b"\7",
    "longer than the file": b"\xff" * 40,
    "a list": b"\5" + bytes(7) + b"[1,2]",
    "half": b"\1" + bytes(7) + b"{",
    "not UTF-8": b"\2" + bytes(7) + b"\xff}",
    "no offsets": b"\x1e" + bytes(7) + b'{"a":{"dtype":7,"shape":[1,2]}}',
}


@pytest.mark.parametrize("raw", HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies(raw: bytes, sharded: Path) -> None:
    shards(sharded)[1].write_bytes(raw)
    with pytest.raises(errors.FileCorrupt):
        outline(sharded)


def test_refusals_are_those_of_opening(sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigMissing):
        outline(tmp_path / "nowhere")
    edit(sharded / "config.json", quantization_config={"quant_method": "awq"})
    with pytest.raises(errors.UnsupportedEncoding, match="awq"):
        outline(sharded)
    edit(sharded / "config.json", quantization_config=None, architectures=["GptOssForCausalLM"])
    with pytest.raises(errors.UnsupportedArchitecture):
        outline(sharded)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(fake.tiny("llama", tmp_path / "llama") / "config.json", pickled)
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(errors.PickleOnly):
        outline(pickled)


def test_the_bench_writes_what_it_says(tmp_path: Path) -> None:
    assert plan_speed.write(tmp_path, shards=7, layers=3, experts=8) == 3 + 3 * (9 + 24)
    found = outline(tmp_path)
    assert (found.dtype, len(found.tensors)) == ("BF16", 3 + 9 + 24)
    assert "not whole" not in found.notes[0]
