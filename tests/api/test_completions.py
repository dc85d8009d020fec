"""Plain completions with the real client: prompts, shapes, stream, logprobs."""

from __future__ import annotations

import openai
import pytest

from tests.api.conftest import Service
from tests.fakes.backend import says, scored


def test_whole_answer(service: Service, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="org/tiny", prompt="Once")
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("Hello there.", "stop", 0, None)
    assert answer.usage.prompt_tokens == 4
    assert service.backend.requests[0].sampling.max_tokens == 16  # the API's default


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [72, 105], [[72, 105]]])
def test_a_prompt_is_text_or_token_ids(service: Service, client: openai.OpenAI, prompt) -> None:
    client.completions.create(model="org/tiny", prompt=prompt)
    assert service.backend.requests[0].token_ids == (72, 105)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (["a", "b"], "UNSUPPORTED_FIELD"),
        ([[1], [2]], "UNSUPPORTED_FIELD"),
        ([], "BAD_REQUEST"),
        ("", "BAD_REQUEST"),
        ([1.5], "BAD_REQUEST"),
        ([-1], "BAD_REQUEST"),
        ([300], "BAD_REQUEST"),  # past the vocabulary
        ({"text": "a"}, "BAD_REQUEST"),
    ],
)
def test_other_prompts_are_refused(service: Service, client: openai.OpenAI, prompt, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="org/tiny", prompt=prompt)
    assert caught.value.body["freetoken_code"] == code and caught.value.body["param"].startswith("prompt")
    assert service.backend.requests == []


def test_stream(service: Service, client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(model="org/tiny", prompt="a", stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello there."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 14


def test_logprobs_are_four_lists_side_by_side(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: scored("xéy", 2)
    logprobs = client.completions.create(model="org/tiny", prompt="a", logprobs=2).choices[0].logprobs
    assert logprobs.text_offset == [0, 1, 1, 2]  # both bytes of é begin where é does
    assert logprobs.token_logprobs == [-byte / 256 for byte in "xéy".encode()]
    assert logprobs.tokens[0] == "x" and logprobs.top_logprobs[0] == {"x": -120 / 256, "y": -121 / 256}
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == 4


def test_the_chosen_token_is_among_its_alternatives(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: scored("x", 0)
    logprobs = client.completions.create(model="org/tiny", prompt="a", logprobs=0).choices[0].logprobs
    assert logprobs.top_logprobs == [{"x": -120 / 256}]


def test_stop_strings(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: says("line one\nline two")
    assert client.completions.create(model="org/tiny", prompt="a", stop="\n").choices[0].text == "line one"
