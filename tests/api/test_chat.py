"""Chat completions over a real socket with the real client: shapes, streams, stop strings, logprobs, limits."""

from __future__ import annotations

import math
import threading
import time

import openai
import pytest

from freetoken.core.events import Tokens
from freetoken.core.types import FinishReason
from tests.api.conftest import Service
from tests.fakes.backend import EOS, limited, says, scored

HI = [{"role": "user", "content": "Hi"}]
PROMPT = b"user: Hi\n"


def ask(client: openai.OpenAI, **fields):
    return client.chat.completions.create(model="org/tiny", messages=HI, **fields)


def streamed_text(chunks) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_whole_answer_has_the_shape_and_the_counts(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: says("Hello there.", cached=5)
    before = int(time.time())
    answer = ask(client)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "org/tiny"
    assert before <= answer.created <= time.time()
    (choice,) = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "Hello there.")
    assert choice.finish_reason == "stop" and choice.logprobs is None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len("Hello there.") + 1  # with the end of sequence
    assert answer.usage.total_tokens == len(PROMPT) + len("Hello there.") + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert not hasattr(answer.usage, "limited_by")
    assert service.backend.requests[0].token_ids == tuple(PROMPT)
    assert service.backend.requests[0].eos_ids == (EOS,)


def test_stream_starts_with_the_role_and_ends_with_the_reason_and_the_usage(
    service: Service, client: openai.OpenAI
) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert streamed_text(chunks) == "Hello there."
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 13
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_without_usage_has_a_choice_in_every_chunk(service: Service, client: openai.OpenAI) -> None:
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in ask(client, stream=True))


def test_an_empty_answer_is_still_an_answer(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: says("")
    chunks = list(ask(client, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
    assert ask(client).choices[0].message.content == ""


@pytest.mark.parametrize("group", [1, 2, 3, 100])
def test_characters_are_whole_however_their_tokens_come(service: Service, client: openai.OpenAI, group: int) -> None:
    text = "Grüße 你好 👩‍👩‍👧 🇩🇪 end"
    service.backend.script = lambda request: says(text, group=group)
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True)]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_shown_as_damaged(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: [Tokens(("é".encode()[0],), finish=FinishReason.LENGTH)]
    assert ask(client).choices[0].message.content == "\ufffd"


@pytest.mark.parametrize("stop", ["END", ["nope", "END"], ["D", "END."]])
@pytest.mark.parametrize("group", [1, 2, 5, 100])
def test_stop_strings_across_tokens(service: Service, client: openai.OpenAI, stop, group: int) -> None:
    service.backend.script = lambda request: [*says("one ENtwo END. three", group=group)]
    want = "one ENtwo EN" if stop == ["D", "END."] else "one ENtwo "
    answer = ask(client, stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (want, "stop")
    chunks = list(ask(client, stop=stop, stream=True))
    assert streamed_text(chunks) == want and chunks[-1].choices[0].finish_reason == "stop"
    assert service.backend.running == 0
    # tokens up to the one that completes the stop string, none after it
    assert answer.usage.completion_tokens == len("one ENtwo END")


def test_a_stop_string_cancels_the_engine_once(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: says("go stop " + "on " * 1000, gap_s=0.001)
    assert ask(client, stop="stop").choices[0].message.content == "go "
    assert (service.backend.cancelled, service.backend.running) == (1, 0)


def test_half_a_stop_string_at_the_end_is_text(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: says("this is the EN")
    assert ask(client, stop="END").choices[0].message.content == "this is the EN"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_go_with_the_text_that_they_are_of(service: Service, client: openai.OpenAI, stream: bool) -> None:
    service.backend.script = lambda request: scored("aé!", 2)
    if stream:
        chunks = list(ask(client, logprobs=True, top_logprobs=2, stream=True))
        entries = []
        for choice in (chunk.choices[0] for chunk in chunks):
            mine = choice.logprobs.content if choice.logprobs else []
            raw = b"".join(bytes(entry.bytes) for entry in mine)
            assert raw.decode() == (choice.delta.content or "")  # the two halves of é come with é
            entries += mine
    else:
        entries = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "aé!"
    assert [entry.logprob for entry in entries] == [-byte / 256 for byte in "aé!".encode()]
    assert entries[0].token == "a" and [top.token for top in entries[0].top_logprobs] == ["a", "b"]
    assert service.backend.requests[0].sampling.logprobs == 2


def test_logprobs_stop_where_the_text_does(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: scored("abSTOPcd", 0)
    choice = ask(client, logprobs=True, stop="STOP").choices[0]
    assert choice.message.content == "ab"
    assert "".join(entry.token for entry in choice.logprobs.content) == "ab"
    assert choice.logprobs.content[0].top_logprobs == []


def test_an_impossible_token_has_a_finite_logprob(service: Service, client: openai.OpenAI) -> None:
    steps = scored("a", 1)
    first = steps[0].logprobs[0].__class__(97, -0.5, ((97, -0.5), (98, -math.inf)))
    service.backend.script = lambda request: [Tokens((97,), (first,)), *steps[1:]]
    top = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0].top_logprobs
    assert [entry.logprob for entry in top] == [-0.5, -9999.0]


def test_an_answer_cut_by_the_pool_says_so(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: limited("short", "kv_pool")
    answer = ask(client)
    assert answer.choices[0].finish_reason == "length" and answer.usage.limited_by == "kv_pool"


def test_explicit_sampling_wins_over_the_models_defaults(service: Service, client: openai.OpenAI) -> None:
    service.host.__init__(
        service.backend, sampling_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.8, "max_new_tokens": 5}
    )
    ask(client, temperature=0, extra_body={"min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True})
    sampling = service.backend.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 20, 0.8, 0.1)
    assert (sampling.repetition_penalty, sampling.ignore_eos, sampling.max_tokens) == (1.1, True, None)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 7),
        ({"max_tokens": 9, "max_completion_tokens": 7}, 7),
    ],
)
def test_max_tokens_by_either_name(service: Service, client: openai.OpenAI, fields: dict, want: int | None) -> None:
    ask(client, **fields)
    assert service.backend.requests[0].sampling.max_tokens == want


def test_template_kwargs_reach_the_template(service: Service, client: openai.OpenAI) -> None:
    ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert bytes(service.backend.requests[0].token_ids) == b"[enable_thinking=False]" + PROMPT


def test_a_long_prompt_holds_up_nobody(service: Service, client: openai.OpenAI) -> None:
    encode = service.host.model.text.encode_chat

    def slowly(text: str) -> list[int]:
        time.sleep(0.5 * ("long" in text))
        return encode(text)

    service.host.model.text.encode_chat = slowly
    long = [{"role": "user", "content": "long"}]
    create = client.chat.completions.create
    waiting = threading.Thread(target=create, kwargs={"model": "org/tiny", "messages": long})
    waiting.start()
    time.sleep(0.1)
    assert ask(client).choices[0].message.content == "Hello there."
    assert waiting.is_alive()
    waiting.join(5)


def test_sixteen_streams_at_once(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: says("word " * 20, gap_s=0.005)
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(streamed_text(ask(client, stream=True)))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == ["word " * 20] * 16
    assert service.backend.most_running >= 8
    assert (service.backend.running, service.backend.cancelled) == (0, 0)
