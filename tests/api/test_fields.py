"""The table of fields: each class, each range, and nothing that is silently ignored."""

from __future__ import annotations

import json

import pytest

from freetoken.api import openai_chat, openai_completions
from freetoken.api.fields import CHAT, COMPLETIONS, Fixed, Honoured, Ignored
from freetoken.core.errors import UnsupportedField, UsageError

CHAT_BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
TEXT_BODY = {"model": "m", "prompt": "Hi"}


def chat(**fields):
    return openai_chat.parse(json.dumps(CHAT_BODY | fields).encode(), "1")[0]


def text(**fields):
    return openai_completions.parse(json.dumps(TEXT_BODY | fields).encode(), "1")[0]


@pytest.mark.parametrize(("table", "parse"), [(CHAT, chat), (COMPLETIONS, text)])
def test_every_field_may_be_null_and_every_ignored_one_anything(table, parse) -> None:
    plain = parse()
    for name, field in table.items():
        if name not in ("model", "messages", "prompt"):
            assert parse(**{name: None}) == plain
        if isinstance(field, Ignored):
            assert field.why and parse(**{name: {"any": ["thing"]}}) == plain
        if isinstance(field, Fixed):
            assert all(parse(**{name: value}) == plain for value in field.values)


@pytest.mark.parametrize(("table", "parse"), [(CHAT, chat), (COMPLETIONS, text)])
def test_every_honoured_field_refuses_a_wrong_type_by_name(table, parse) -> None:
    for name, field in table.items():
        if isinstance(field, Honoured):
            with pytest.raises(UsageError) as caught:
                parse(**{name: [[]]})  # nothing takes a list of an empty list
            assert caught.value.param.startswith(name) and f"`{name}" in caught.value.detail


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"n": True},  # equal to 1 in Python, not in JSON
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"parallel_tool_calls": False},
        {"modalities": ["text", "audio"]},
        {"reasoning_effort": "high"},
        {"guided_json": {}},
        {"echo": True},
        {"best_of": 3},
        {"suffix": "x"},
        {"made_up": 0},
        {"prompt": "Hi"},
    ],
)
def test_fields_that_would_do_nothing_are_refused_by_name(fields: dict) -> None:
    (name,) = fields
    for table, parse in ((CHAT, chat), (COMPLETIONS, text)):
        if isinstance(table.get(name), Honoured):
            continue
        with pytest.raises(UnsupportedField) as caught:
            parse(**fields)
        assert caught.value.param == name and f"`{name}`" in caught.value.detail and caught.value.fixes


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.7, 2], [-0.1, 2.1, True]),
        ("top_p", [0, 0.5, 1], [-0.1, 1.1]),
        ("min_p", [0, 1], [-0.1, 1.5]),
        ("top_k", [-1, 0, 50], [-2, 1.5, True]),
        ("repetition_penalty", [0.5, 1, 2], [0, -1, 11]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("max_tokens", [1, 100_000], [0, -1, 1.0, True, 1 << 31]),
        ("max_completion_tokens", [1], [0, "5"]),
        ("seed", [0, -1, (1 << 63) - 1], [1.5, 1 << 63, True]),
        ("stop", ["a", ["a", "b"], [], ["x"] * 16], ["", ["a", ""], ["x"] * 17, [1], {}]),
        (
            "logit_bias",
            [{}, {"5": 1, "3": -100}],
            [{"five": 1}, {"-1": 1}, {"5": 101}, {"5": None}, [5], {"1" * 40: 1}],
        ),
        ("stream", [True, False], [1, "yes"]),
        ("ignore_eos", [True, False], [1]),
        ("logprobs", [True, False], [1, "yes"]),
        ("chat_template_kwargs", [{}, {"enable_thinking": False}], [[], {"messages": []}, {"self": 1}]),
        ("model", ["org/name"], ["", 5]),
    ],
)
def test_ranges(name: str, good: list, bad: list) -> None:
    for value in good:
        chat(**{name: value})
    for value in bad:
        with pytest.raises(UsageError) as caught:
            chat(**{name: value})
        assert caught.value.param.startswith(name), value


def test_values_arrive_as_the_engine_wants_them() -> None:
    ask = chat(logit_bias={"5": 1, "3": -2}, stop="END", top_k=-1, seed=7, logprobs=True)
    assert ask.sampling["logit_bias"] == ((3, -2.0), (5, 1.0))
    assert (ask.stop, ask.sampling["top_k"], ask.sampling["seed"], ask.sampling["logprobs"]) == (("END",), 0, 7, 0)
    assert chat(logprobs=True, top_logprobs=20).sampling["logprobs"] == 20
    assert chat(top_logprobs=0).sampling["logprobs"] is None
    assert "temperature" not in chat().sampling  # so that the model's default can fill it
    assert text(logprobs=3).sampling["logprobs"] == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 21},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": 1}},
        {"stream": True, "stream_options": {"made_up": True}},
        {"stream": True, "stream_options": True},
    ],
)
def test_fields_that_need_each_other(fields: dict) -> None:
    with pytest.raises(UsageError) as caught:
        chat(**fields)
    assert caught.value.param.split(".")[0] in fields


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_what_is_missing_is_named(missing: str) -> None:
    body = {name: value for name, value in CHAT_BODY.items() if name != missing}
    with pytest.raises(UsageError) as caught:
        openai_chat.parse(json.dumps(body).encode(), "1")
    assert caught.value.param == missing


def test_long_values_are_shortened_in_messages() -> None:
    with pytest.raises(UsageError) as caught:
        chat(temperature="x" * 10_000)
    assert len(caught.value.detail) < 150
