"""safetensors headers: the same tensors as the reference library, and nothing but a typed refusal for the rest."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from freetoken.catalog.safetensors import INDEX, outline, read_file, read_folder
from freetoken.core import errors

WEIGHTS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_the_index_is_that_of_the_reference_library(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    weights = WEIGHTS | {"c": torch.zeros(3, dtype=torch.int64), "d": torch.zeros(()), "e": torch.zeros(0, 4)}
    save_file(weights, file, metadata={"format": "pt"})
    found = read_file(file)
    with safe_open(file, "pt") as theirs:
        assert found.keys() == set(theirs.keys())
        for name, info in found.items():
            part = theirs.get_slice(name)
            assert (info.encoding, info.shape) == (part.get_dtype(), tuple(part.get_shape()))
    for name, info in found.items():
        raw = file.read_bytes()[info.offset : info.offset + info.size]
        assert raw == weights[name].contiguous().view(torch.uint8).numpy().tobytes() if weights[name].dim() else True


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry()}, b"1234567", "truncated"),
        ({"a": entry()}, b"123456789", "has"),
        ({"a": entry(shape=[3])}, b"12345678", "needs 12 bytes"),
        ({"a": entry(offsets=[8, 0])}, b"12345678", "data_offsets"),
        ({"a": entry(offsets=[-8, 0])}, b"12345678", "data_offsets"),
        ({"a": entry(offsets=[0])}, b"12345678", "data_offsets"),
        ({"a": entry(shape=[-2])}, b"12345678", "shape"),
        ({"a": entry(shape=[1 << 62, 1 << 62])}, b"12345678", "shape"),
        ({"a": entry(shape=[1] * 9)}, b"12345678", "shape"),
        ({"a": entry(shape=[2.0])}, b"12345678", "shape"),
        ({"a": entry(), "b": entry()}, b"12345678", "begins"),
        ({"a": entry(offsets=[4, 12])}, b"123456789012", "begins"),
        ({"a": entry("F4", [3], [0, 8])}, b"12345678", "blocks"),
        ({"a": 7}, b"", "no dtype"),
        (b'{"a": 1, "a": 1}', b"", "twice"),
        (b"[]", b"", "not a JSON object"),
        (b"{}x", b"", "not valid JSON"),
        (b"\xff\xff", b"", "not valid JSON"),
    ],
)
def test_a_header_that_lies(header: object, data: bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(errors.FileCorrupt, match=says):
        read_file(write(tmp_path / "x.safetensors", header, data))


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedEncoding, match="Z9"):
        read_file(write(tmp_path / "x.safetensors", {"a": entry("Z9")}, b"12345678"))


@pytest.mark.parametrize("length", [1 << 62, 101 << 20, 100])
def test_a_header_length_beyond_the_file_allocates_nothing(length: int, tmp_path: Path) -> None:
    file = write(tmp_path / "x.safetensors", {}, length=length)
    with pytest.raises(errors.FileCorrupt) as raised:
        read_file(file)
    assert raised.value.numbers == {"expected_bytes": 8 + length, "found_bytes": 10}


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_length(size: int, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(errors.FileCorrupt):
        read_file(tmp_path / "x.safetensors")


def test_a_truncated_file_says_how_many_bytes(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file(WEIGHTS, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    with pytest.raises(errors.FileCorrupt) as raised:
        read_file(file)
    assert raised.value.numbers == {"expected_bytes": len(whole), "found_bytes": len(whole) - 3}


# ── folders ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def shards(folder: Path, names: tuple[str, ...] = ("model-00001-of-00002", "model-00002-of-00002")) -> list[Path]:
    files = [folder / f"{name}.safetensors" for name in names]
    for file, (key, weight) in zip(files, WEIGHTS.items(), strict=True):
        save_file({key: weight}, file)
    return files


def index(folder: Path, **weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("indexed", [True, False])
def test_shards_are_read_together(indexed: bool, tmp_path: Path) -> None:
    files = shards(tmp_path)
    if indexed:
        index(tmp_path, a=files[0].name, b=files[1].name)
        save_file(WEIGHTS, tmp_path / "consolidated.safetensors")  # not listed: another form of the same weights
    assert {name: info.file for name, info in read_folder(tmp_path).items()} == {"a": files[0], "b": files[1]}


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard_is_named(indexed: bool, tmp_path: Path) -> None:
    files = shards(tmp_path)
    if indexed:
        index(tmp_path, a=files[0].name, b=files[1].name)
    files[1].unlink()
    with pytest.raises(errors.WeightsMissing, match="model-00002-of-00002") as raised:
        read_folder(tmp_path)
    assert raised.value.numbers == {"missing": 1, "files": 2}


def test_a_listed_tensor_that_no_file_holds(tmp_path: Path) -> None:
    files = shards(tmp_path)
    index(tmp_path, a=files[0].name, b=files[1].name, c=files[1].name)
    with pytest.raises(errors.FileCorrupt, match="c"):
        read_folder(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file(WEIGHTS, tmp_path / f"{name}.safetensors")
    with pytest.raises(errors.FileCorrupt, match=r"one\.safetensors and in two"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        *("../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "a\\x.safetensors", "C:x.safetensors"),
        *("..", "", 7, "x\0.safetensors", "x.bin"),
    ],
)
def test_a_shard_name_that_leaves_the_folder(shard: object, tmp_path: Path) -> None:
    index(tmp_path, a=shard)
    with pytest.raises(errors.FileCorrupt, match="no plain file name"):
        read_folder(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "no"])
def test_an_index_without_a_map(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(errors.FileCorrupt, match=INDEX):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_opened(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(errors.PickleOnly, match=name) as raised:
        read_folder(tmp_path)
    assert raised.value.fixes


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(errors.WeightsMissing):
        read_folder(tmp_path)


# ── fuzz ────────────────────────────────────────────────────────────────────────────────────────────────────────────
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "Q4_0", ""]) | JSON,
        "shape": st.lists(st.integers(-1, 9) | st.integers(), max_size=9) | JSON,
        "data_offsets": st.lists(st.integers(-1, 80) | st.integers(), min_size=2, max_size=2) | JSON,
    }
)


def only_typed_errors(read: Callable[[], object]) -> None:
    tracemalloc.start()
    try:
        read()
    except errors.CheckpointError as refusal:
        assert len(refusal.detail) < 10_000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4 << 20


def look_at_all(folder: Path) -> None:
    for header in outline(folder).headers:
        for name in header.entries:
            header.tensor(name)


@FUZZ
@given(st.binary(max_size=64))
@example(b"\0" * 8)
def test_any_bytes(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    only_typed_errors(lambda: read_file(tmp_path / "x.safetensors"))
    only_typed_errors(lambda: look_at_all(tmp_path))


@FUZZ
@given(st.dictionaries(st.text(max_size=6), ENTRIES | JSON, max_size=4), st.integers(0, 64))
def test_any_header(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    file = write(tmp_path / "x.safetensors", header, bytes(size))
    only_typed_errors(lambda: read_file(file))
    only_typed_errors(lambda: look_at_all(tmp_path))


@FUZZ
@given(st.data())
def test_a_valid_file_with_some_bytes_changed(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "x.safetensors"
    save_file(WEIGHTS, file)
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    only_typed_errors(lambda: read_file(file))
    only_typed_errors(lambda: look_at_all(tmp_path))


@FUZZ
@given(JSON | st.dictionaries(st.sampled_from(["weight_map", "metadata", "x"]), JSON, max_size=3))
def test_any_index(tmp_path: Path, index: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    only_typed_errors(lambda: look_at_all(tmp_path))
