"""The loading loop: every step and format, progress, cancelling, damaged files, and what assemble measures."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy
import pytest
import torch

from freetoken.catalog.checkpoint import open_checkpoint
from freetoken.catalog.encodings import ENCODINGS, TensorInfo
from freetoken.catalog.names import AddOne, Item, MappedTensor, Part, Rows, Squeeze, Step, Stride, Transpose, Unpermute
from freetoken.core.errors import CheckpointError, FileCorrupt, LoadCancelled, TensorMismatch, WeightsMissing
from freetoken.engine.assemble import assemble
from freetoken.engine.load import pipeline
from freetoken.engine.load.pipeline import load, verify
from freetoken.engine.load.sinks import ResidentSink
from freetoken.engine.models.build import build
from tests.fakes.checkpoint import tiny
from tests.fakes.driver import engine, resolved

torch.set_num_threads(1)


def _stored(path: Path, array: torch.Tensor, encoding: str = "F32", offset: int = 3) -> TensorInfo:
    """A file with `array` at an odd offset."""
    gguf = pytest.importorskip("gguf")
    data = gguf.quants.quantize(array.numpy(), gguf.GGMLQuantizationType[encoding]).tobytes()
    path.write_bytes(b"x" * offset + data)
    return TensorInfo("stored", encoding, tuple(array.shape), path, offset, len(data))


def _load(tensor: MappedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    destination = torch.full(tensor.shape, float("nan"), dtype=dtype)
    load({tensor.name: tensor}, ResidentSink({tensor.name: destination}), lambda *_: None, lambda: False)
    return destination


def _mapped(info: TensorInfo, *steps: Step) -> MappedTensor:
    shape = info.shape
    for step in steps:
        shape = step.shape(shape)
    return MappedTensor("m", shape, (Part(info, steps),))


_ARRAY = torch.arange(6 * 4 * 32, dtype=torch.float32).view(6, 4, 32) % 97


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), _ARRAY),
        ((Item(4),), _ARRAY[4]),
        ((Item(4), Rows(1, 1, 3)), _ARRAY[4, 1:3]),
        ((Item(2), Item(3)), _ARRAY[2, 3]),
        ((Rows(2, 1, 3),), torch.cat((_ARRAY[1:3], _ARRAY[4:6]))),
        ((Rows(1, 2, 5), Stride(1, 3)), _ARRAY[3:4]),
        ((Item(1), Transpose()), _ARRAY[1].T),
        ((Rows(1, 0, 1), Squeeze(0), AddOne()), _ARRAY[0] + 1),
        ((Item(0), Unpermute(1)), _ARRAY[0, [0, 2, 1, 3]]),
    ],
)
@pytest.mark.parametrize("piece", [pipeline.PIECE, 200])
def test_steps(
    steps: tuple[Step, ...], expected: torch.Tensor, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "PIECE", piece)  # many pieces, some of one row
    assert torch.equal(_load(_mapped(_stored(tmp_path / "f", _ARRAY), *steps)), expected)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("piece", [pipeline.PIECE, 100])
@pytest.mark.parametrize("steps", [(), (Rows(1, 2, 5),), (Rows(2, 0, 2),)])
def test_formats(
    encoding: str, piece: int, steps: tuple[Step, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(pipeline, "PIECE", piece)
    numbers = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    kind = gguf.GGMLQuantizationType[encoding]
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(numbers.numpy(), kind), kind)).view(6, 64)
    expected = {0: expected, 1: expected[2:5]}[len(steps)] if steps != (Rows(2, 0, 2),) else expected[[0, 1, 3, 4]]
    info = _stored(tmp_path / "f", numbers, encoding)
    assert torch.equal(_load(_mapped(info, *steps)), expected)
    assert torch.equal(_load(_mapped(info, *steps), torch.bfloat16), expected.bfloat16())


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    one, two = _stored(tmp_path / "1", _ARRAY[0]), _stored(tmp_path / "2", _ARRAY[1], "BF16", 0)
    joined = MappedTensor("m", (6, 32), (Part(two), Part(one, (Rows(1, 1, 3),))))
    assert torch.equal(_load(joined), torch.cat((_ARRAY[1], _ARRAY[0, 1:3])))


def test_an_expert_of_a_packed_tensor_reads_its_own_bytes_only(tmp_path: Path) -> None:
    info = _stored(tmp_path / "f", _ARRAY)
    seen: list[tuple[int, int]] = []
    load(
        {"m": _mapped(info, Item(3))}, ResidentSink({"m": torch.empty(4, 32)}), lambda *a: seen.append(a), lambda: False
    )
    assert seen[-1] == (4 * 32 * 4, 4 * 32 * 4)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    info = _stored(tmp_path / "f", _ARRAY)
    info.file.write_bytes(info.file.read_bytes()[:-1])
    with pytest.raises(FileCorrupt, match="3074") as caught:
        _load(_mapped(info))
    assert caught.value.numbers["expected_bytes"] == info.offset + info.size
    info.file.write_bytes(b"")
    with pytest.raises(FileCorrupt, match="empty"):
        _load(_mapped(info))
    info.file.unlink()
    with pytest.raises(WeightsMissing, match="No such file"):
        _load(_mapped(info))


def test_verify_names_what_differs(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("llama", tmp_path))
    destinations = dict(build(checkpoint.spec, weight_dtype="float32", context=512).destinations)
    verify(checkpoint.tensors, destinations)
    destinations["head.weight"] = destinations["head.weight"][1:]
    del destinations["embed.weight"]
    with pytest.raises(TensorMismatch, match=r"2 tensors.*embed\.weight: file \(160, 64\), model None.*\(159, 64\)"):
        verify(checkpoint.tensors, destinations)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_assemble_reports_and_measures(dtype: str, tmp_path: Path) -> None:
    folder = tiny("mixtral", tmp_path, sharded=True)
    said: list[tuple[str, int, int, str]] = []
    loaded = assemble(folder, resolved(dtype), lambda *line: said.append(line), lambda: False)
    assert list(dict.fromkeys(line[0] for line in said)) == ["resolve", "verify", "read_weights", "build_kv", "warmup"]
    for phase, lines in itertools.groupby(said, key=lambda line: line[0]):
        done = [line[1] for line in lines]
        assert done == sorted(done), phase
    last = {line[0]: line for line in said}
    assert all(done == total for _, done, total, _ in last.values())
    size = sum(tensor.parts[0].tensor.size for tensor in open_checkpoint(folder).tensors.values())
    assert last["read_weights"][1:] == (size, size, "bytes")
    measured = loaded.measured
    assert measured["kv_bytes"] == 4 * 2 * 2 * 16 * 4 * (256 + 1) * 4  # layers, k and v, heads, dim, fp32, slots
    assert measured["weights_bytes"] == pytest.approx(size if dtype == "float32" else size / 2, rel=0.05)
    assert all(f"{phase}_s" in measured for phase in last) and int(measured["rss_bytes"]) > 10**7
    assert loaded.runner.expert_tokens() == ((0,) * 8,) * 4  # the warm-up does not count


def test_a_cancelled_load_stops_at_once(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    for after in range(1, 12):
        asked = itertools.count()
        with pytest.raises(LoadCancelled):
            assemble(folder, resolved(), lambda *_: None, lambda after=after, asked=asked: next(asked) >= after - 1)


def test_no_second_copy_of_the_weights(tmp_path: Path) -> None:
    """Destinations are views into what the model computes with: loading leaves nothing to copy afterwards."""
    loaded = engine(tiny("qwen3_moe", tmp_path))
    names = {name for name in open_checkpoint(tmp_path).tensors if ".experts.3." in name}
    before = loaded.runner._model.destinations
    storage = {before[name].untyped_storage().data_ptr() for name in names}
    assert len(storage) == 3 * 2  # a bank of gates and ups and one of downs in each of three routed layers
    loaded.close()
    with pytest.raises(AttributeError):
        loaded.runner.expert_tokens()


def test_truncated_shard_is_refused_before_anything_large(tmp_path: Path) -> None:
    folder = tiny("llama", tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        engine(folder)


def test_numbers_that_numpy_wrote(tmp_path: Path) -> None:
    """F16 by numpy, not by any library that also reads it."""
    array = numpy.linspace(-3, 3, 12, dtype=numpy.float16).reshape(3, 4)
    (tmp_path / "f").write_bytes(array.tobytes())
    info = TensorInfo("stored", "F16", (3, 4), tmp_path / "f", 0, 24)
    assert numpy.array_equal(_load(_mapped(info)).numpy(), array.astype(numpy.float32))
