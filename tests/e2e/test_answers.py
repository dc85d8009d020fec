"""The demo through everything: command line, daemon, real engine, and the real openai client."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import Person

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
DEADLINE_S = 60.0
AGE_S = 2.0  # the engine tells its counters once a second, between steps


def client(person: Person) -> OpenAI:
    return OpenAI(base_url=f"{person.url}/v1", api_key="none", timeout=DEADLINE_S, max_retries=0)


def stats(person: Person) -> dict[str, Any]:
    with person.control() as control:
        found: dict[str, Any] = control.engine()["stats"]
        return found


def eventually(holds: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return holds()


def test_a_question_is_answered(serving: Person) -> None:
    answer = client(serving).chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 3


def test_a_stream_says_the_same_as_a_whole_answer(serving: Person) -> None:
    ask: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client(serving).chat.completions.create(**ask)
    chunks = list(client(serving).chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_stop_string_ends_the_answer_before_itself(serving: Person) -> None:
    answer = client(serving).chat.completions.create(model="demo", messages=QUESTION, temperature=0, stop=["Paris"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == "The capital of France is "


def test_logprobs_are_those_of_the_chosen_tokens(serving: Person) -> None:
    answer = client(serving).chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    scores = answer.choices[0].logprobs.content or []
    assert "".join(score.token for score in scores) == answer.choices[0].message.content
    for score in scores:  # greedy: the chosen token is the best
        assert score.logprob == max(top.logprob for top in score.top_logprobs) <= 0
        assert len(score.top_logprobs) == 3


def test_the_status_shows_the_experts(serving: Person) -> None:
    client(serving).chat.completions.create(model="demo", messages=QUESTION, max_tokens=4)
    assert "30 × 8 experts" in serving.ft("status").stdout

    def counts() -> list[list[int]]:
        with serving.control() as control:
            experts = control.engine()["experts"]
        assert (experts["layers"], experts["experts"]) == (30, 8)
        found: list[list[int]] = experts["tokens"]
        return found

    assert eventually(lambda: counts()[0][0] > 0, within_s=AGE_S)
    assert all(len(set(layer)) == 1 for layer in counts())  # all 8 are routed: each saw every token


def test_a_client_that_leaves_gives_its_pages_back(serving: Person) -> None:
    def at_rest() -> bool:
        now = stats(serving)
        return now["running"] == 0 and now["pages_free"] + now["pages_cached"] == now["pages_total"]

    assert eventually(at_rest, within_s=AGE_S + 1)
    stream = client(serving).completions.create(
        model="demo", prompt="Once upon a time", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in itertools.islice(stream, 3):
        pass
    assert eventually(lambda: stats(serving)["running"] == 1 and not at_rest(), within_s=AGE_S)
    stream.close()
    assert eventually(at_rest, within_s=AGE_S + 1)


def test_sixteen_requests_run_together(serving: Person) -> None:
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        answer = client(serving).completions.create(
            model="demo",
            prompt=f"{number} is a number that",
            max_tokens=48,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        texts[number] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: stats(serving)["running"] >= 8, within_s=20)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(texts) == 16
    assert all(texts.values())


def test_a_second_identical_prompt_is_found_in_the_prefix_cache(serving: Person) -> None:
    prompt = " ".join(f"The number after {n} is {n + 1}." for n in range(125))
    ask: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    first = client(serving).completions.create(**ask)
    second = client(serving).completions.create(**ask)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens >= 1000
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 40
    assert second.choices[0].text == first.choices[0].text


def test_a_prompt_longer_than_the_window_is_refused_with_both_numbers(serving: Person) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        client(serving).completions.create(model="demo", prompt="one " * 9000, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert all(number in str(refused.value) for number in ("9001", "8191"))
    assert client(serving).chat.completions.create(model="demo", messages=QUESTION, max_tokens=2).choices


def test_chat_asks_one_question_and_says_how_fast(serving: Person) -> None:
    said = serving.ft("chat", "--temperature", "0", "--ask", "What is the capital of France?")
    assert said.stdout == "The capital of France is Paris.\n"
    assert "tok/s" in said.stderr
    assert "first token" in said.stderr
