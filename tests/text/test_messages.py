"""Conversations as clients send them, made ready for templates."""

from __future__ import annotations

from typing import Any

import pytest

from freetoken.core.errors import MalformedBody, UnsupportedContent
from freetoken.text.messages import prepare


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def test_system_and_developer_messages_become_one_first_message() -> None:
    """Templates raise when a system message is not first or comes twice."""
    messages = [
        turn("system", "A"),
        turn("user", "u"),
        turn("developer", "B"),
        turn("assistant", "a"),
        turn("system", ""),
    ]
    assert prepare(messages) == [turn("system", "A\n\nB"), turn("user", "u"), turn("assistant", "a")]


def test_neighbours_of_one_role_become_one_turn() -> None:
    """user, user, user, assistant, assistant, assistant; a system message between does not part them."""
    messages = [turn("user", "1"), turn("system", "S"), turn("user", "2"), turn("user", "3"), turn("assistant", "x"),
                turn("assistant", None), turn("assistant", "y")]  # fmt: skip
    assert prepare(messages) == [turn("system", "S"), turn("user", "1\n2\n3"), turn("assistant", "x\ny")]


def test_what_clients_send_back_is_cleaned() -> None:
    """Reasoning fields, nulls and calls of an earlier answer."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answer = turn("assistant", None, tool_calls=[call], reasoning_content="hm", thinking="hm", refusal=None, audio=None)
    later = turn("assistant", "done", tool_calls=None, function_call=None)
    got = prepare(
        [turn("user", "u"), answer, turn("tool", "7", tool_call_id="c1"), later, turn("user", "v", name="Ann")]
    )
    parsed = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert got == [
        turn("user", "u"),
        turn("assistant", "", tool_calls=[parsed]),
        turn("tool", "7", tool_call_id="c1"),
        turn("assistant", "done"),
        turn("user", "v", name="Ann"),
    ]


def test_two_tool_answers_stay_apart_and_calls_of_merged_turns_add_up() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": "not json"}} for name in "fg"]
    got = prepare([turn("assistant", "a", tool_calls=calls[:1]), turn("assistant", "b", tool_calls=calls[1:]),
                   turn("tool", "1"), turn("tool", "2")])  # fmt: skip
    assert got == [turn("assistant", "a\nb", tool_calls=calls), turn("tool", "1"), turn("tool", "2")]


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert prepare([turn("user", parts)]) == [turn("user", "one\ntwo")]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", None])
def test_parts_that_are_not_text_are_refused_by_type(kind: str | None) -> None:
    with pytest.raises(UnsupportedContent, match=repr(kind)) as caught:
        prepare([turn("user", [{"type": "text", "text": "see"}, {"type": kind}])])
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hello"], "messages[0]"),
        ([turn("user", "u"), {"content": "x"}], "messages[1].role"),
        ([turn("wizard", "x")], "messages[0].role"),
        ([turn("user", 5)], "messages[0].content"),
        ([turn("user", ["x"])], "messages[0].content[0]"),
        ([turn("user", [{"type": "text", "text": 5}])], "messages[0].content[0].text"),
        ([turn("assistant", "", tool_calls="f")], "messages[0].tool_calls"),
        ([turn("assistant", "", tool_calls=[{"function": 5}])], "messages[0].tool_calls"),
    ],
)
def test_shapes_that_are_no_messages_are_refused_by_place(messages: list[Any], param: str) -> None:
    with pytest.raises(MalformedBody) as caught:
        prepare(messages)
    assert caught.value.param == param


def test_the_messages_given_are_not_changed() -> None:
    given = [turn("user", "1"), turn("user", "2", tool_calls=[{"function": {"arguments": "{}"}}])]
    before = repr(given)
    prepare(given)
    assert repr(given) == before
