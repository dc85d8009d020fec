"""Stop strings: nothing of one is shown, and it does not matter how the text is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.text.stop import StopStrings

texts = st.text(alphabet="abc\n", max_size=24)
stops = st.lists(st.text(alphabet="abc\n", min_size=1, max_size=5), max_size=3)


def shown(stop_strings: list[str], chunks: list[str]) -> tuple[str, bool]:
    stream, out, hit = StopStrings(stop_strings), "", False
    for chunk in chunks:
        text, hit = stream.push(chunk)
        out += text
        if hit:
            return out, True
    return out + stream.flush(), hit


def expected(stop_strings: list[str], text: str) -> tuple[str, bool]:
    """By definition: the shortest beginning of `text` that ends in a stop string, without the longest such."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(stops, texts, st.data())
def test_any_cut_gives_what_the_definition_says(stop_strings: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    assert shown(stop_strings, chunks) == expected(stop_strings, text)


@given(stops, texts)
def test_what_is_shown_never_needs_to_be_taken_back(stop_strings: list[str], text: str) -> None:
    stream, out = StopStrings(stop_strings), ""
    final = expected(stop_strings, text)[0]
    for char in text:
        out += stream.push(char)[0]
        assert final.startswith(out)


def test_text_that_cannot_become_a_stop_string_is_not_held() -> None:
    stream = StopStrings(["\n\nUser:"])
    assert stream.push("Hello") == ("Hello", False)
    assert stream.push(" there\n") == (" there", False)
    assert stream.push("x") == ("\nx", False)


@pytest.mark.parametrize("stop_strings", [[], [""]])
def test_without_stop_strings_text_passes(stop_strings: list[str]) -> None:
    stream = StopStrings(stop_strings)
    assert stream.push("abc") == ("abc", False)
    assert stream.flush() == ""


def test_nothing_is_shown_after_a_hit() -> None:
    stream = StopStrings(["END"])
    assert stream.push("a END b") == ("a ", True)
    assert stream.push("more") == ("", True)
    assert stream.flush() == ""
