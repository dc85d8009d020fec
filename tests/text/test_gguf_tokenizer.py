"""Tokenizers built from GGUF metadata, against the tokenizer that the vocabulary came from and against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from freetoken.catalog.gguf import read_gguf
from freetoken.core.errors import CheckpointError, FileCorrupt, TokenizerMissing
from freetoken.text.gguf_tokenizer import RULES, build_tokenizer, damage_reported
from freetoken.text.tokenizer import gguf_text

TEXTS = [
    "Hello  world\n\n\n  123 4567 ½ ² ⅷ don't I'LL we've THEY'RE",
    "日本語のテキスト。中文测试 한국어 ١٢٣",
    "😀👨‍👩‍👧‍👦 family, naïve café, combine\u0301d",
    "def f(x):\n\treturn x**2  # 3.14\r\n\r\n  0. item",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "HTTPServer camelCase snake_case $5 <= 7^2 ~ a|b",
    "",
    " ",
    "   a",
]
MIXED = st.text(alphabet="aéZ中😀 \n\t1٣_-'sS$=<|>.\u0301", max_size=40)
QUICK = settings(max_examples=60, deadline=None)


def metadata_of(tokenizer: Tokenizer, **extra: Any) -> dict[str, object]:
    """tokenizer.ggml.* of a byte-level tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [(3 if added[i].special else 4) if i in added else 1 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def sentencepiece_metadata(tokenizer: Tokenizer, **extra: Any) -> dict[str, object]:
    """Scores as SentencePiece's BPE gives them: minus the rank of the merge that makes the piece."""
    model = json.loads(tokenizer.to_str())["model"]
    ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(model["merges"])))}
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [2, 3, 3, *([6] * 256), *([1] * (len(tokens) - 259))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-ranks.get(token, len(tokens))) for token in tokens],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def write(path: Path, metadata: dict[str, object]) -> Path:
    """A GGUF file with that metadata and what transformers wants to know of an architecture."""
    writer = gguf.GGUFWriter(path, "llama")
    add: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        add[type(value)](key, value)
    for key, count in (("block_count", 1), ("embedding_length", 8), ("attention.head_count", 1)):
        writer.add_uint32(f"llama.{key}", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ── byte-level ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_equals_the_tokenizer_it_came_from(byte_level: Tokenizer, text: str) -> None:
    built = build_tokenizer(metadata_of(byte_level))
    assert built.encode(text).ids == byte_level.encode(text).ids
    assert built.decode(built.encode(text).ids) == byte_level.decode(byte_level.encode(text).ids)


def words(cut: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    return [word for word, _ in cut.pre_tokenize_str(text)]


def test_digits_are_split_before_words_as_smollm_does(byte_level: Tokenizer) -> None:
    built = build_tokenizer(metadata_of(byte_level, pre="smollm"))
    theirs = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert words(built.pre_tokenizer, text) == words(theirs, text)
    assert "ĊĊĠĠ" in words(built.pre_tokenizer, "end\n\n  0. item")


@pytest.mark.parametrize("name", ["llama-bpe", "qwen2", "tekken", "gpt-2"])
@given(text=MIXED)
@QUICK
def test_words_are_cut_as_transformers_cuts_them(name: str, byte_level: Tokenizer, text: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    split = GGUF_PRE_TOKENIZER_SPLITS.get(name)
    theirs = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if split is None
        else pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    built = build_tokenizer(metadata_of(byte_level, pre=name))
    assert words(built.pre_tokenizer, text) == words(theirs, text)


@pytest.mark.parametrize("name", sorted(RULES))
@given(text=MIXED)
@settings(max_examples=15, deadline=None)
def test_every_rule_loses_nothing(name: str, byte_level: Tokenizer, text: str) -> None:
    built = build_tokenizer(metadata_of(byte_level, pre=name, add_bos_token=False))
    normal = built.normalizer.normalize_str(text) if built.normalizer else text
    assert built.decode(built.encode(text).ids, skip_special_tokens=False) == normal


@pytest.mark.slow
def test_a_file_read_back_equals_transformers(byte_level: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write(tmp_path / "model.gguf", metadata_of(byte_level, pre="llama-bpe", add_bos_token=True))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = gguf_text(read_gguf(path).metadata).tokenizer
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.get_vocab_size() == theirs.vocab_size == byte_level.get_vocab_size()


def test_token_types_decide_what_is_found_whole_and_what_is_shown(byte_level: Tokenizer) -> None:
    built = build_tokenizer(metadata_of(byte_level))
    ids = built.encode("a<|im_end|><think step>").ids
    assert ids[-2:] == [byte_level.token_to_id("<|im_end|>"), byte_level.token_to_id("<think step>")]
    assert built.decode(ids) == "a<think step>"


def test_an_unknown_rule_is_named_with_the_known_ones(byte_level: Tokenizer) -> None:
    with pytest.raises(TokenizerMissing, match=r"'martian'.*smollm"):
        build_tokenizer(metadata_of(byte_level, pre="martian"))


# ── SentencePiece ───────────────────────────────────────────────────────────────────────────────────────────────────
@given(text=st.text(alphabet="the quickbrown fx,é中😀\n", max_size=40))
@QUICK
def test_merges_recovered_from_scores_make_the_same_tokens(sentencepiece: Tokenizer, text: str) -> None:
    built = build_tokenizer(sentencepiece_metadata(sentencepiece))
    assert built.encode(text).ids == sentencepiece.encode(text).ids
    assert built.decode(built.encode(text).ids) == text


@pytest.mark.slow
def test_sentencepiece_equals_transformers(sentencepiece: Tokenizer, tmp_path: Path) -> None:
    """On texts that do not begin with a space or hold special tokens: there transformers' class for new files puts
    one space less than SentencePiece, llama.cpp and the older tokenizer.json files do."""
    from transformers import AutoTokenizer

    path = write(tmp_path / "model.gguf", sentencepiece_metadata(sentencepiece))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = gguf_text(read_gguf(path).metadata).tokenizer
    for text in ["The quick brown fox", "over  the lazy\n dog", "unknown: 中 é 😀", "a" * 50]:
        assert ours.encode(text).ids == theirs(text)["input_ids"]
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True)


def test_without_the_prefix_space_none_is_added_or_taken(sentencepiece: Tokenizer) -> None:
    built = build_tokenizer(sentencepiece_metadata(sentencepiece, add_space_prefix=False))
    assert built.decode(built.encode(" the").ids) == " the"
    assert built.encode("the").tokens[1] != "▁the"


@pytest.mark.parametrize(("flags", "bos", "eos"), [({}, True, False), ({"add_bos_token": False}, False, False),
                                                   ({"add_eos_token": True}, True, True)])  # fmt: skip
def test_bos_and_eos_as_the_file_says(sentencepiece: Tokenizer, flags: dict[str, bool], bos: bool, eos: bool) -> None:
    ids = build_tokenizer(sentencepiece_metadata(sentencepiece, **flags)).encode("the").ids
    assert (ids[0] == 1, ids[-1] == 2) == (bos, eos)


# ── bad files ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": ["a", 5]}, "tokens is not an array of str"),
        ({"token_type": [1, 1]}, "token_type has 2 entries"),
        ({"merges": ["ab"]}, "not two tokens"),
        ({"merges": ["a "]}, "not two tokens"),
        ({"merges": ["nowhere atall"]}, "cannot be built"),
        ({"bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"bos_token_id": "x"}, "expected int"),
    ],
)
def test_tables_that_do_not_fit_are_reported(byte_level: Tokenizer, change: dict[str, Any], message: str) -> None:
    with pytest.raises(FileCorrupt, match=message):
        build_tokenizer(metadata_of(byte_level, **change))


@pytest.mark.parametrize("change", [{"tokens": []}, {"model": "rwkv"}, {"model": ""}])
def test_no_usable_tokenizer(byte_level: Tokenizer, change: dict[str, Any]) -> None:
    with pytest.raises(TokenizerMissing):
        build_tokenizer(metadata_of(byte_level, **change))


def test_scores_or_merges_are_needed(sentencepiece: Tokenizer) -> None:
    with pytest.raises(FileCorrupt, match="neither"):
        build_tokenizer(sentencepiece_metadata(sentencepiece, scores=[]))


def test_templates_and_special_texts_come_along(byte_level: Tokenizer) -> None:
    extra = {"tokenizer.chat_template": "main", "tokenizer.chat_template.tool_use": "tools"}
    files = gguf_text(metadata_of(byte_level) | extra)
    assert files.templates == {"default": "main", "tool_use": "tools"}
    assert files.special == {"bos_token": "<s>", "eos_token": "</s>"}


def test_qwen2_composes_characters_as_its_own_tokenizer_does(byte_level: Tokenizer) -> None:
    for name, same in (("qwen2", True), ("gpt-2", False)):
        built = build_tokenizer(metadata_of(byte_level, pre=name))
        assert (built.encode("e\u0301").ids == built.encode("\u00e9").ids) == same


numbers = st.sampled_from([0, 1, 2, 3, 4, 6, 99, -1])
pieces = st.sampled_from(["a", "b", "ab", "", "<s>", "\u0120a", "\u2581", "<0x41>", " ", "a b"])


@given(
    model=st.sampled_from(["gpt2", "llama"]),
    tokens=st.lists(pieces, min_size=1, max_size=8),
    columns=st.fixed_dictionaries(
        {},
        optional={
            "merges": st.lists(st.sampled_from(["a b", "b a", "a  b", "\u0120 a", "ab a"]), max_size=2),
            "bos_token_id": numbers,
            "unknown_token_id": numbers,
            "add_eos_token": st.booleans(),
        },
    ),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_nonsense_is_built_or_refused(
    model: str, tokens: list[str], columns: dict[str, Any], data: st.DataObject
) -> None:
    columns |= {"token_type": data.draw(st.lists(numbers, min_size=len(tokens), max_size=len(tokens)))}
    columns |= {"scores": data.draw(st.lists(st.floats(), min_size=len(tokens), max_size=len(tokens)))}
    keys = {"model": model, "tokens": tokens, **columns}
    try:
        built = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    except CheckpointError as error:
        assert error.detail
    else:
        assert isinstance(built.encode("ab <s> a").ids, list)


def test_a_panic_of_the_package_is_a_damaged_file() -> None:
    class PanicException(BaseException):
        """As the package's own is: no Exception, and not to be imported."""

    with pytest.raises(FileCorrupt, match="cannot be built: boom"), damage_reported("It cannot be built"):
        raise PanicException("boom")
    with pytest.raises(KeyboardInterrupt), damage_reported("It cannot be built"):
        raise KeyboardInterrupt
