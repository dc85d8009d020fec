"""Server-sent events: the standard's own examples, and any cut into lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetoken.client.sse import Record, records

LINE = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=20)


def test_examples_of_the_standard() -> None:
    """WHATWG HTML, section 9.2.6: comments, several data lines, an id, and a block that the end cuts off."""
    stream = ": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\ndata: lost"
    found = list(records(stream.split("\n")))
    assert [(record.data, record.id) for record in found] == [
        ("first event", "1"),
        ("second event", ""),
        (" third event", ""),
    ]


def test_names_and_unknown_fields() -> None:
    assert list(records(["event: add", "data: 1", "retry: 5", "", "data", "data", ""])) == [
        Record("1", None, "add"),
        Record("\n", None, "message"),
    ]


def test_a_block_without_data_gives_nothing() -> None:
    assert list(records(["event: add", "", ": ping", ""])) == []


@given(st.lists(st.lists(LINE, min_size=1, max_size=4), max_size=6))
def test_what_was_written_is_read(blocks: list[list[str]]) -> None:
    lines = [line for block in blocks for line in [*(f"data: {part}" for part in block), ": note", ""]]
    assert [record.data for record in records(lines)] == ["\n".join(block) for block in blocks]
