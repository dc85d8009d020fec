"""Every error a caller can meet: its status, codes, numbers and remedy, before a stream and in the middle of one."""

from __future__ import annotations

import json
import logging

import httpx
import openai
import pytest

from freetoken.core.errors import EngineDied, FreeTokenError, QueueFull, leaves
from freetoken.core.events import Failed, Tokens
from freetoken.core.types import FinishReason
from tests.api.conftest import Service
from tests.fakes.backend import says

HI = [{"role": "user", "content": "Hi"}]


def post(service: Service, *, route: str = "chat/completions", **fields) -> httpx.Response:
    body = {"model": "org/tiny", "messages": HI} | fields
    return service.http.post(f"{service.url}/v1/{route}", json=body)


def fault(reply: httpx.Response) -> dict:
    assert set(reply.json()) == {"error"}
    return reply.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_a_400_with_both_numbers(service: Service, stream: bool) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    reply = post(service, messages=long, stream=stream)
    error = fault(reply)
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["freetoken_code"] == "CONTEXT_LENGTH_EXCEEDED" and error["type"] == "invalid_request_error"
    assert error["numbers"] == {"prompt_tokens": 5007, "context_tokens": 4096}
    assert "5007" in error["message"] and "4095" in error["message"] and "shorter prompt" in error["message"]
    assert service.backend.requests == []


def test_the_longest_prompt_that_leaves_one_token_is_taken(service: Service) -> None:
    fits = 4095 - len("user: \n")
    assert post(service, messages=[{"role": "user", "content": "x" * fits}]).status_code == 200
    assert post(service, messages=[{"role": "user", "content": "x" * (fits + 1)}]).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", sorted(leaves()))
def test_what_the_engine_refuses_first_is_an_http_status(service: Service, code: str, stream: bool) -> None:
    kind = leaves()[code]
    service.backend.script = lambda request: [Failed(code, "It has 7 of 5.", {"have": 7})]
    reply = post(service, stream=stream)
    error = fault(reply)
    assert reply.status_code == kind.http_status and reply.headers["content-type"] == "application/json"
    assert (error["freetoken_code"], error["code"], error["numbers"]) == (code, kind.openai_code, {"have": 7})
    assert error["message"].startswith("It has 7 of 5.")
    assert ("retry-after" in reply.headers) == (reply.status_code in (429, 503))


def test_the_client_knows_a_full_queue(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: [QueueFull("64 requests wait.", retry_after_s=2.4)]
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="org/tiny", messages=HI, stream=True)
    assert caught.value.code == "rate_limit_exceeded" and caught.value.response.headers["retry-after"] == "3"


def test_a_dead_engine_in_mid_stream_is_an_error_event_and_no_done(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: [
        *says("Hel", gap_s=0.001)[:-1],
        EngineDied("The engine ended by signal 9.", numbers={"signal": 9}),
    ]
    text = post(service, stream=True).text
    last = text.rstrip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["freetoken_code"] == "ENGINE_DIED"
    assert "[DONE]" not in text and text.count('"error"') == 1
    with pytest.raises(openai.APIError, match="signal 9"):
        list(client.chat.completions.create(model="org/tiny", messages=HI, stream=True))
    assert post(service).status_code == 503  # not streamed: nothing was sent yet
    service.backend.script = lambda request: says("alive")
    assert client.chat.completions.create(model="org/tiny", messages=HI).choices[0].message.content == "alive"


def test_a_stream_that_just_ends_is_an_error(service: Service) -> None:
    service.backend.script = lambda request: says("half")[:-1]
    assert fault(post(service))["freetoken_code"] == "ENGINE_ERROR"


def test_an_answer_that_the_engine_cancels_is_an_error(service: Service) -> None:
    service.backend.script = lambda request: [Tokens((97,), finish=FinishReason.CANCELLED)]
    assert fault(post(service))["numbers"] == {"tokens": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_expected_is_logged_and_not_shown(service: Service, stream: bool, caplog) -> None:
    service.backend.script = lambda request: [ZeroDivisionError("secret detail")]
    with caplog.at_level(logging.ERROR, logger="freetoken.api.errors"):
        reply = post(service, stream=stream)
    assert reply.status_code == 500 and fault(reply)["type"] == "server_error"
    assert "secret" not in reply.text and "Traceback" not in reply.text
    assert reply.headers["x-request-id"] in fault(reply)["message"]
    (record,) = caplog.records
    assert reply.headers["x-request-id"] in record.getMessage() and record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": }', "byte 10"),
        (b'{"model": "a"', "13 bytes"),
        (b'{"temperature": NaN}', "byte 16"),
        (b"", "0 bytes"),
        (b"\xff\xfe", "byte 0"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[" * 200_000, "recursion"),
        (b"[1, 2]", "a list of 2"),
        (b'"hello"', '"hello"'),
    ],
)
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_malformed_bodies(service: Service, route: str, body: bytes, says: str) -> None:
    reply = service.http.post(f"{service.url}/v1/{route}", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, fault(reply)["freetoken_code"]) == (400, "MALFORMED_BODY")
    assert says in fault(reply)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_content_that_a_text_model_cannot_read(service: Service, kind: str, stream: bool) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}]
    reply = post(service, messages=[{"role": "user", "content": parts}], stream=stream)
    assert (reply.status_code, fault(reply)["freetoken_code"]) == (400, "UNSUPPORTED_CONTENT")
    assert kind in fault(reply)["message"] and service.backend.requests == []


@pytest.mark.parametrize("messages", [[], None, "Hi", [1], [{"content": "Hi"}], [{"role": "king", "content": "Hi"}]])
def test_messages_that_are_none(service: Service, messages) -> None:
    reply = post(service, messages=messages)
    assert reply.status_code == 400 and fault(reply)["param"].startswith("messages")


def test_unknown_and_unloaded_models(service: Service, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="org/none", messages=HI)
    assert unknown.value.code == "model_not_found" and "org/tiny" in unknown.value.message
    with pytest.raises(openai.ConflictError) as unloaded:
        client.chat.completions.create(model="org/other", messages=HI, stream=True)
    assert unloaded.value.body["freetoken_code"] == "MODEL_NOT_LOADED"
    assert "Run `ft load org/other`." in unloaded.value.message


def test_a_logit_bias_past_the_vocabulary(service: Service) -> None:
    reply = post(service, logit_bias={"300": 1})
    assert (reply.status_code, fault(reply)["param"]) == (400, "logit_bias")
    assert post(service, logit_bias={"299": 1}).status_code == 200


def test_a_large_body_is_read_whole(service: Service) -> None:
    reply = post(service, messages=[{"role": "user", "content": "x" * 3_000_000}])
    assert fault(reply)["numbers"]["prompt_tokens"] == 3_000_007


def test_errors_without_numbers_or_fixes_keep_the_shape(service: Service) -> None:
    service.backend.script = lambda request: [FreeTokenError("Broken")]
    assert fault(post(service)) == {
        "message": "Broken.",
        "type": "server_error",
        "param": None,
        "code": None,
        "freetoken_code": "INTERNAL",
        "numbers": {},
        "fixes": [],
    }
