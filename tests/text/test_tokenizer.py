"""Hugging Face folders: the same tokens as transformers, every place a template may lie in, and each bad file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from freetoken.core.errors import FileCorrupt, TokenizerMissing
from freetoken.text.tokenizer import read_hf_text

TEXTS = ["Hello  the quick\n\n 123 brown", "<s>a</s><|im_end|>b", "日本語 😀 naïve", "", " lead"]


def folder(path: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None) -> Path:
    tokenizer.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def same_as_transformers(path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(path)
    ours = read_hf_text(path).tokenizer
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False)["input_ids"]
        ids = ours.encode(text).ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_encodes_as_transformers_does(
    kind: str, flag: bool | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Whatever add_bos_token says: tokenizer.json decides."""
    config = {"bos_token": "<s>", "eos_token": "</s>"} | ({} if flag is None else {"add_bos_token": flag})
    same_as_transformers(folder(tmp_path, request.getfixturevalue(kind), config))


def test_named_tokens_are_special_even_when_tokenizer_json_does_not_say_so(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    eos = {"content": "the", "lstrip": False, "special": True, "__type": "AddedToken"}
    text = read_hf_text(folder(tmp_path, byte_level, {"eos_token": eos, "pad_token": "<not there>", "unk_token": None}))
    assert text.special == {"eos_token": "the", "pad_token": "<not there>"}
    assert text.tokenizer.decode(text.tokenizer.encode("the").ids) == ""
    assert text.tokenizer.token_to_id("<not there>") is None


def test_truncation_and_padding_of_somebodys_training_are_off(byte_level: Tokenizer, tmp_path: Path) -> None:
    copy = Tokenizer.from_str(byte_level.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=64)
    copy.post_processor = processors.ByteLevel()
    ours = read_hf_text(folder(tmp_path, copy)).tokenizer
    assert ours.encode("the quick brown fox jumps").ids == byte_level.encode("the quick brown fox jumps").ids


def test_templates_lie_in_many_places(byte_level: Tokenizer, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}, {"name": "broken"}, 5]
    folder(tmp_path, byte_level, {"chat_template": named})
    assert read_hf_text(tmp_path).templates == {"default": "A", "tool_use": "T"}
    (tmp_path / "chat_template.json").write_text('{"chat_template": "B"}')
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert read_hf_text(tmp_path).templates == {"default": "B", "tool_use": "T", "rag": "R"}
    (tmp_path / "chat_template.jinja").write_text("C", encoding="utf-8")
    assert read_hf_text(tmp_path).templates["default"] == "C"


def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json") as caught:
        read_hf_text(tmp_path)
    assert any("save_pretrained" in fix for fix in caught.value.fixes)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}'),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"{'a'"),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b"\xff"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_damaged_file_is_named(byte_level: Tokenizer, tmp_path: Path, name: str, content: bytes) -> None:
    folder(tmp_path, byte_level, {})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileCorrupt, match=name):
        read_hf_text(tmp_path)
