"""Clients that leave, and clients that must be told to wait."""

from __future__ import annotations

import json
import socket
import time

import openai
import pytest

from freetoken.core.events import Failed, Tokens
from tests.api.conftest import Service
from tests.fakes.backend import says

HI = [{"role": "user", "content": "Hi"}]


def open_raw(service: Service, **fields) -> socket.socket:
    """A request on a socket of our own, so that it can be cut at any moment. It buffers little of what is not read."""
    body = json.dumps({"model": "org/tiny", "messages": HI} | fields).encode()
    raw = socket.socket()
    raw.settimeout(5)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    raw.connect(("127.0.0.1", service.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    raw.sendall(head.encode() + body)
    return raw


def until(condition, seconds: float = 5.0) -> float:
    """Waits for `condition`; returns how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "did not happen in time"
        time.sleep(0.005)
    return time.monotonic() - start


def read_until(raw: socket.socket, mark: bytes, times: int = 1) -> bytes:
    got = b""
    while got.count(mark) < times:
        got += raw.recv(4096)
    return got


@pytest.mark.parametrize("stalls", [False, True])
def test_leaving_in_mid_stream_cancels_once(service: Service, client: openai.OpenAI, stalls: bool) -> None:
    start, pause, rest = says("abcd", gap_s=0.01)[:8], [60.0] * stalls, says("x" * 4096, gap_s=0.01)
    service.backend.script = lambda request: [
        *start,
        *pause,
        *rest,
    ]
    raw = open_raw(service, stream=True, max_tokens=4096)
    read_until(raw, b'"content":', 4)
    raw.close()
    assert until(lambda: service.backend.running == 0) < 1.0
    time.sleep(0.1)
    assert service.backend.cancelled == 1
    service.backend.script = lambda request: says("alive")
    assert client.chat.completions.create(model="org/tiny", messages=HI).choices[0].message.content == "alive"


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_cancels_once(service: Service, stream: bool) -> None:
    service.backend.script = lambda request: [60.0, *says("late")]
    raw = open_raw(service, stream=stream)
    until(lambda: service.backend.running == 1)
    raw.close()
    assert until(lambda: service.backend.running == 0) < 1.0
    assert service.backend.cancelled == 1


def test_leaving_while_an_answer_is_gathered_cancels_once(service: Service) -> None:
    service.backend.script = lambda request: says("x" * 4096, gap_s=0.01)
    raw = open_raw(service)
    until(lambda: service.backend.running == 1)
    time.sleep(0.05)
    raw.close()
    assert until(lambda: service.backend.running == 0) < 1.0
    assert service.backend.cancelled == 1


def test_leaving_while_the_model_loads_asks_nothing_of_the_engine(service: Service) -> None:
    service.host.loading_s = 0.3
    open_raw(service, stream=True).close()
    time.sleep(0.5)
    assert service.backend.requests == []


def test_closing_the_client_stream_is_leaving(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: says("x" * 4096, gap_s=0.005)
    stream = client.chat.completions.create(model="org/tiny", messages=HI, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    assert until(lambda: service.backend.running == 0) < 1.0
    assert service.backend.cancelled == 1


def test_a_client_that_stops_reading_is_dropped(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: [Tokens((120,) * 1000), 0.001] * 5_000  # 5 MB: more than is buffered
    raw = open_raw(service, stream=True)
    until(lambda: service.backend.running == 1)
    until(lambda: service.backend.running == 0)
    assert service.backend.cancelled == 1
    raw.close()
    service.backend.script = lambda request: says("alive")
    assert client.chat.completions.create(model="org/tiny", messages=HI).choices[0].message.content == "alive"


def test_a_whole_answer_cancels_nothing(service: Service, client: openai.OpenAI) -> None:
    list(client.chat.completions.create(model="org/tiny", messages=HI, stream=True))
    client.chat.completions.create(model="org/tiny", messages=HI)
    assert (service.backend.running, service.backend.cancelled) == (0, 0)


def test_comments_flow_until_the_first_token(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: [0.5, *says("Hi", gap_s=0.15)]
    raw = open_raw(service, stream=True)
    head = read_until(raw, b": waiting\n\n")
    for header in (b"200 OK", b"text/event-stream", b"no-store", b"x-accel-buffering: no"):
        assert header in head
    rest = read_until(raw, b"[DONE]")
    first = rest.index(b'"role"')
    assert (head + rest[:first]).count(b": waiting") >= 3 and b": waiting" not in rest[first:]
    chunks = list(client.chat.completions.create(model="org/tiny", messages=HI, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hi"


def test_comments_flow_while_the_model_loads(service: Service) -> None:
    service.host.loading_s = 0.4
    raw = open_raw(service, stream=True)
    got = read_until(raw, b"[DONE]")
    assert b": waiting" in got and got.count(b'"role"') == 1


def test_an_error_after_comments_is_an_event(service: Service) -> None:
    service.backend.script = lambda request: [0.3, Failed("QUEUE_TIMEOUT", "It waited 600 s.", {"position": 3})]
    reply = service.http.post(
        f"{service.url}/v1/chat/completions", json={"model": "org/tiny", "messages": HI, "stream": True}
    )
    comments, _, event = reply.text.partition("data: ")
    assert reply.status_code == 200 and ": waiting" in comments
    assert json.loads(event)["error"]["numbers"] == {"position": 3} and "[DONE]" not in reply.text


def test_a_whole_answer_may_take_its_time(service: Service, client: openai.OpenAI) -> None:
    service.backend.script = lambda request: [0.5, *says("slow")]
    assert client.chat.completions.create(model="org/tiny", messages=HI).choices[0].message.content == "slow"
