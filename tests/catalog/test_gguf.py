"""GGUF headers: the same facts as the gguf package, and nothing but a typed refusal for the rest."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.catalog.checkpoint import open_checkpoint
from freetoken.catalog.encodings import STORED
from freetoken.catalog.gguf import _TYPES, read_gguf
from freetoken.core import errors
from tests.fakes import checkpoint as fake

Make = Callable[[str], Path]


# ── agreement with the package ──────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("quant", ["F32", "Q8_0", "Q4_1"])
def test_metadata_and_tensors_are_those_of_the_package(quant: str, tmp_path: Path) -> None:
    path = fake.tiny_gguf("llama", tmp_path / "x.gguf", quant=quant, tokenizer=True)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (info.encoding, info.offset, info.size) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)


def test_types_and_block_sizes_are_those_of_the_package() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if int(kind) in _TYPES:
            encoding = STORED[_TYPES[int(kind)]]
            assert (encoding.name, encoding.block, encoding.bytes_per_block) == (kind.name, block, size)


def test_every_kind_of_metadata_value(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    kinds = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
    for kind in kinds:
        getattr(writer, f"add_{kind}")(kind, -3 if kind.startswith("int") else 200)
    writer.add_float32("float32", 0.5)
    writer.add_float64("float64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("string", "grüße")
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("strings", ["a", "", "日本"])
    writer.add_array("nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "x.gguf").metadata
    assert [metadata[kind] for kind in kinds] == [-3 if kind.startswith("int") else 200 for kind in kinds]
    assert (metadata["float32"], metadata["float64"], metadata["bool"]) == (0.5, 0.1, True)
    assert (metadata["string"], metadata["strings"]) == ("grüße", ["a", "", "日本"])
    assert (metadata["floats"], metadata["nested"]) == ([0.5, 1.5], [[1, 2], [3]])


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_token_list([f"token{number}" for number in range(150_000)])
    writer.add_token_merges([f"to ken{number}" for number in range(150_000)])
    writer.add_token_types([1] * 150_000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    start = time.process_time()
    metadata = read_gguf(tmp_path / "x.gguf").metadata
    assert time.process_time() - start < 1.0  # three times the vocabulary for which 0.3 s are allowed
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert tokens[149_999] == "token149999"


# ── made by hand ────────────────────────────────────────────────────────────────────────────────────────────────────
def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "t", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(tensors: int = 0, entries: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, entries)


def padded(raw: bytes, data: int = 0, alignment: int = 32) -> bytes:
    return raw + bytes(-len(raw) % alignment + data)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "too short"),
        (b"GGUF" + bytes(10), "too short"),
        (padded(header(magic=b"GGML")), "no GGUF"),
        (padded(header(tensors=1 << 62)), "claims 4611686018427387904 tensors"),
        (padded(header(entries=1 << 62)), "claims 4611686018427387904 metadata"),
        (header(entries=1) + key("a", 8, struct.pack("<Q", 1 << 62)), "string claims"),
        (header(entries=1) + struct.pack("<Q", 70_000) + bytes(100_000), "string claims 70000"),
        (header(entries=1) + key("a", 9, struct.pack("<IQ", 4, 1 << 62)), "array of"),
        (header(entries=1) + key("a", 9, struct.pack("<IQ", 8, 1 << 22)), "ends in its header"),
        (header(entries=1) + key("a", 9, struct.pack("<IQ", 4, 1 << 22)), "ends in its header"),
        (header(entries=1) + key("a", 9, struct.pack("<IQ", 9, 1) * 9 + bytes(99)), "depth 3"),
        (header(entries=1) + key("a", 77, bytes(8)), "value type 77"),
        (header(entries=2) + key("a", 0, b"1") * 2, "twice"),
        (header(entries=1) + key("general.alignment", 4, struct.pack("<I", 0)), "alignment"),
        (header(entries=1) + key("general.alignment", 8, text("32")), "alignment"),
        (padded(header(tensors=1) + tensor(shape=()), 32), "0 dimensions"),
        (padded(header(tensors=1) + tensor(shape=(1,) * 5), 32), "5 dimensions"),
        (padded(header(tensors=1) + tensor(shape=(1 << 63, 1 << 63)), 32), "truncated"),
        (padded(header(tensors=1) + tensor(shape=(33,), kind=2), 99), "whole Q4_0 blocks"),
        (padded(header(tensors=1) + tensor(), 31), "truncated"),
        (padded(header(tensors=1) + tensor(offset=(1 << 64) - 32), 32), "truncated"),
        (padded(header(tensors=2) + tensor() * 2, 64), "twice"),
        (padded(header(tensors=2) + tensor("a") + tensor("b", offset=4), 64), "share bytes"),
    ],
)
def test_a_header_that_lies(raw: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(errors.FileCorrupt, match=says) as raised:
        read_gguf(tmp_path / "x.gguf")
    assert raised.value.numbers or "twice" in says or "no GGUF" in says


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (padded(header(version=1)), "version 1"),
        (padded(header(version=3 << 24)), "big-endian"),
        (padded(header(tensors=1) + tensor(kind=99), 32), "unknown type 99"),
    ],
)
def test_a_form_that_is_not_supported(raw: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(errors.UnsupportedEncoding, match=says):
        read_gguf(tmp_path / "x.gguf")


def test_a_truncated_file_says_how_many_bytes(tmp_path: Path) -> None:
    path = fake.tiny_gguf("qwen3", tmp_path / "x.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(errors.FileCorrupt, match="truncated") as raised:
        open_checkpoint(path)
    assert raised.value.numbers["found_bytes"] == len(whole) - 100


# ── what cannot be honoured ─────────────────────────────────────────────────────────────────────────────────────────
def changed(path: Path, old: bytes, new: bytes) -> Path:
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new))
    return path


def copy(make: Make, family: str, folder: Path) -> Path:
    path = folder / "x.gguf"
    path.write_bytes(make(family).read_bytes())
    return path


@pytest.mark.parametrize(
    ("old", "new", "kind", "says"),
    [
        ("rope.scaling.factor", "rope.scalins.factor", errors.ConfigInvalid, "rope.scaling.factor"),
        ("linear", "dynami", errors.ConfigInvalid, "dynami"),
        ("rope.dimension_count", "rope.dimension_count", None, ""),
        ("attention.head_count_kv", "attention.head_count_kx", errors.TensorMismatch, "mixer.k"),
        ("context_length", "context_lengtx", errors.ConfigInvalid, "max_position_embeddings"),
        ("blk.3.ffn_up", "blk.9.ffn_up", errors.TensorMismatch, "layers.9.ffn.dense.up"),
    ],
)
def test_metadata_that_does_not_fit(
    old: str, new: str, kind: type[errors.CheckpointError] | None, says: str, tiny_file: Make, tmp_path: Path
) -> None:
    path = changed(copy(tiny_file, "llama_linear", tmp_path), old.encode(), new.encode())
    if kind is None:
        assert open_checkpoint(path).family == "llama"
        return
    with pytest.raises(kind, match=says):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("add", "kind", "says"),
    [
        (lambda w: w.add_logit_scale(2.0), errors.ConfigInvalid, "logit_scale"),
        (lambda w: w.add_rope_dimension_count(8), errors.ConfigInvalid, "rope.dimension_count"),
        (lambda w: w.add_head_count_kv([2, 1, 2, 2]), errors.ConfigInvalid, "same for every layer"),
        (lambda w: w.add_uint16("split.count", 3), errors.UnsupportedEncoding, "one of 3 parts"),
        (lambda w: w.add_block_count(10**9), errors.ConfigInvalid, "num_hidden_layers"),
    ],
)
def test_facts_that_are_refused(
    add: Callable[[Any], None], kind: type[errors.CheckpointError], says: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    fake.write_facts(writer, fake.build("llama").config)
    for values in writer.kv_data:
        for name in ("llama.rope.dimension_count", "llama.attention.head_count_kv", "llama.block_count"):
            values.pop(name, None)
    add(writer)
    for name, value in (("block_count", 4), ("attention.head_count_kv", 2)):
        if f"llama.{name}" not in writer.kv_data[0]:
            writer.add_uint32(f"llama.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(kind, match=says):
        open_checkpoint(tmp_path / "x.gguf")


def test_a_type_that_cannot_be_decoded_is_named_with_its_tensor(tiny_file: Make, tmp_path: Path) -> None:
    """The 64 x 128 output projection of a qwen3, called Q8_1 by its type number."""
    path = fake.tiny_gguf("qwen3", tmp_path / "x.gguf", quant="Q8_0")
    name = b"blk.0.attn_output.weight"
    old = name + struct.pack("<IQQI", 2, 128, 64, 8)
    changed(path, old, name + struct.pack("<IQQI", 2, 128, 64, 20))  # IQ4_NL: smaller blocks, so still inside the file
    with pytest.raises(errors.UnsupportedEncoding, match=r"blk\.0\.attn_output\.weight .* IQ4_NL"):
        open_checkpoint(path)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_end_tokens_come_from_the_metadata(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(fake.tiny_gguf(family, tmp_path / "x.gguf", tokenizer=True))
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.text.kind) == (fake.BOS, (fake.EOS,), "gguf")


# ── fuzz ────────────────────────────────────────────────────────────────────────────────────────────────────────────
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def only_typed_errors(path: Path) -> None:
    tracemalloc.start()
    try:
        open_checkpoint(path)
    except errors.CheckpointError as refusal:
        assert len(refusal.detail) < 300_000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 << 20


@FUZZ
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 3))
def test_any_bytes_after_a_good_beginning(tmp_path: Path, raw: bytes, tensors: int, entries: int) -> None:
    (tmp_path / "x.gguf").write_bytes(header(tensors, entries) + raw)
    only_typed_errors(tmp_path / "x.gguf")


@FUZZ
@given(st.data())
def test_a_valid_file_with_some_bytes_changed(tmp_path: Path, tiny_file: Make, data: st.DataObject) -> None:
    raw = bytearray(tiny_file("qwen3_moe").read_bytes())
    start = min(info.offset for info in read_gguf(tiny_file("qwen3_moe")).tensors.values())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, start - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "x.gguf").write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    only_typed_errors(tmp_path / "x.gguf")
