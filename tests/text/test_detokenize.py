"""Streams of tokens against the tokenizers package's decode of the whole sequence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from freetoken.core.errors import TokenizerMissing
from freetoken.text.detokenize import Detokenizer, Spelling

QUICK = settings(max_examples=80, deadline=None)
EMOJI = "I 👩‍👩‍👧‍👦 love 日本語 naïve 😀!"
streams = st.lists(st.lists(st.integers(0, 10_000), max_size=4), max_size=12)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def spelling(tokenizer: Tokenizer) -> Spelling:
    return Spelling.of(tokenizer, special_ids(tokenizer))


def streamed(stream: Detokenizer, chunks: list[list[int]]) -> str:
    return "".join(map(stream.push, chunks)) + stream.flush()


def flat(chunks: list[list[int]]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk]


def word_level() -> Tokenizer:
    """No decoder: the package joins tokens by spaces."""
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(["a", "bb", "<unk>", "né"])}, "<unk>"))


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["▁a", "b▁", "▁", "▁▁c", "<unk>"])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme)
    tokenizer.decoder = decoders.Metaspace("▁", scheme)
    return tokenizer


@given(streams)
@QUICK
def test_byte_level_equals_the_decode_of_the_whole(byte_level: Tokenizer, chunks: list[list[int]]) -> None:
    chunks = [[i % byte_level.get_vocab_size() for i in chunk] for chunk in chunks]
    assert streamed(Detokenizer(spelling(byte_level)), chunks) == byte_level.decode(flat(chunks))


@given(st.text(max_size=30), st.data())
@QUICK
def test_sentencepiece_gives_every_text_back(sentencepiece: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = sentencepiece.encode(text).ids
    cut = data.draw(st.integers(0, len(ids)))
    got = streamed(Detokenizer(spelling(sentencepiece)), [ids[:cut], *([i] for i in ids[cut:])])
    assert got == sentencepiece.decode(ids)


@given(streams)
@QUICK
def test_sentencepiece_with_bytes_that_are_no_text(sentencepiece: Tokenizer, chunks: list[list[int]]) -> None:
    """Bytes from 0x80 on only: no run of them is partly valid, which is where we differ on purpose."""
    lone = [3 + 0x80 + i for i in range(0x40)]  # continuation bytes: never the start of a character
    rest = list(range(259, sentencepiece.get_vocab_size()))
    choice = [*lone, *rest, 0, 1, 2]
    chunks = [[choice[i % len(choice)] for i in chunk] for chunk in chunks]
    assert streamed(Detokenizer(spelling(sentencepiece)), chunks) == sentencepiece.decode(flat(chunks))


@pytest.mark.parametrize("tokenizer", [word_level(), metaspace("always"), metaspace("first"), metaspace("never")])
@given(chunks=streams)
@QUICK
def test_other_decoders_equal_the_decode_of_the_whole(tokenizer: Tokenizer, chunks: list[list[int]]) -> None:
    chunks = [[i % tokenizer.get_vocab_size() for i in chunk] for chunk in chunks]
    assert streamed(Detokenizer(spelling(tokenizer)), chunks) == tokenizer.decode(flat(chunks))


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_appears_with_its_last_byte_and_never_as_a_half(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    table = spelling(tokenizer)
    ids = tokenizer.encode(EMOJI, add_special_tokens=False).ids
    stream, shown, read = Detokenizer(table), "", b""
    halves = 0
    for token_id in ids:
        shown += stream.push([token_id])
        read += table.bytes_of(token_id)
        complete = read.decode("utf-8", "ignore").removeprefix(" " * table.strip)
        assert shown == complete
        halves += len(read.decode("utf-8", "ignore").encode()) < len(read)
    assert shown == EMOJI
    assert halves >= 3  # the case is met
    assert stream.flush() == ""


def test_an_unfinished_character_at_the_end_is_replaced(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🤖").ids
    assert len(ids) > 1  # not in the corpus: spelled in bytes
    assert streamed(Detokenizer(spelling(byte_level)), [ids[:-1]]) == byte_level.decode(ids[:-1]) == "\ufffd"


def test_complete_characters_stay_when_the_run_of_bytes_turns_out_wrong(sentencepiece: Tokenizer) -> None:
    ids = [3 + byte for byte in "€".encode()] + [3 + 0xFF]
    stream = Detokenizer(spelling(sentencepiece))
    assert stream.push(ids[:3]) == "€"
    assert stream.push(ids[3:]) == "\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("prompt", ["The quick", "", "cut in 日", "ends in a space "])
def test_after_a_prompt_the_text_goes_on(kind: str, prompt: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    whole = tokenizer.encode(prompt + " brown fox").ids
    start = tokenizer.encode(prompt).ids
    out = (
        whole[len(start) :] if whole[: len(start)] == start else tokenizer.encode(" fox", add_special_tokens=False).ids
    )
    got = streamed(Detokenizer(spelling(tokenizer), start), [out])
    assert tokenizer.decode(start) + got == tokenizer.decode([*start, *out])


def test_a_character_begun_in_the_prompt_is_finished(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a🤖").ids
    assert streamed(Detokenizer(spelling(byte_level), ids[:-1]), [ids[-1:]]) == "🤖"


def test_special_tokens_are_not_shown_but_can_be_spelled(byte_level: Tokenizer) -> None:
    end = byte_level.token_to_id("<|im_end|>")
    shown = byte_level.token_to_id("<think step>")
    table = spelling(byte_level)
    assert streamed(Detokenizer(table), [[end, shown, end]]) == "<think step>"
    assert table.bytes_of(end) == b"<|im_end|>"
    assert [table.bytes_of(i) for i in (-1, 10**9)] == [b"", b""]


def test_each_token_is_spelled_once(byte_level: Tokenizer) -> None:
    asked: list[int] = []

    class Counting:
        decoder = byte_level.decoder

        def id_to_token(self, id: int) -> str | None:
            asked.append(id)
            return byte_level.id_to_token(id)

    ids = byte_level.encode("the quick brown fox").ids
    stream = Detokenizer(Spelling.of(Counting()))
    for _ in range(50):
        stream.push(ids)
    assert len(asked) <= len(set(ids)) + 2


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    tokenizer = word_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerMissing, match="WordPiece"):
        Spelling.of(tokenizer)
