"""An answer is the same however its tokens are grouped, and its scores stay with its text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetoken.api.assembly import Assembler, Delta
from freetoken.core.events import Tokens
from freetoken.core.types import FinishReason, TokenLogprob
from tests.fakes.backend import EOS
from tests.fakes.host import ByteCodec

CODEC = ByteCodec()
texts = st.text(alphabet="ab\n é🗼", max_size=30)
stops = st.lists(st.text(alphabet="ab\né🗼", min_size=1, max_size=4), max_size=3)


def assemble(text: str, stop: list[str], cuts: list[int]) -> tuple[Assembler, list[Delta]]:
    """`text` and an end of sequence, a byte a token, in events of the sizes `cuts` in turn."""
    ids = [*text.encode(), EOS]
    assembler = Assembler(CODEC, (1, 2, 3), stop, continues=False)
    deltas = []
    turn = 0
    while not assembler.done:
        part, ids = ids[: cuts[turn % len(cuts)]], ids[cuts[turn % len(cuts)] :]
        scores = tuple(TokenLogprob(token, -1.0) for token in part)
        delta = assembler.push(Tokens(tuple(part), scores, finish=None if ids else FinishReason.STOP))
        deltas += [delta] if delta else []
        turn += 1
    return assembler, deltas


def cut_at_stops(text: str, stop: list[str]) -> str:
    """The definition, on the whole text: the stop string that is complete first ends it where that one begins."""
    for end in range(len(text) + 1):
        begins = [end - len(one) for one in stop if text[:end].endswith(one)]
        if begins:
            return text[: min(begins)]
    return text


@given(texts, stops, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_grouping_changes_nothing(text: str, stop: list[str], cuts: list[int]) -> None:
    assembler, deltas = assemble(text, stop, cuts)
    shown = "".join(delta.text for delta in deltas)
    assert shown == cut_at_stops(text, stop)
    assert assembler.done.finish is FinishReason.STOP
    scores = [score for delta in deltas for score in delta.scores]
    assert b"".join(score.chosen.raw for score in scores) == shown.encode()
    position = 0
    for delta in deltas:
        assert all(position <= score.offset < position + len(delta.text) for score in delta.scores)
        position += len(delta.text)
    alone = assemble(text, stop, [1])[0]
    assert assembler.done == alone.done  # counts too
