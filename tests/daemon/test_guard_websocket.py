"""WebSocket handshakes at the door of a real daemon: the checks of HTTP, and three ways to show the token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from freetoken.daemon.guard import MESSAGE, UNPROVEN
from tests.fakes.door import Door, door

TAURI = "tauri://localhost"
PATH = "/api/v1/events/ws"
UPGRADE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with door(tmp_path_factory.mktemp("plain") / "home") as found:
        yield found


def dial(plain: Door, path: str = PATH, **options: Any) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{plain.port}{path}", proxy=None, **options)


def close_code(socket: ClientConnection) -> int | None:
    """The code that the server closes with."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(timeout=15)
    return closed.value.rcvd.code if closed.value.rcvd else None


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"host": "evil.example:1919"}, 400, "HOST_REFUSED"),
        ({"host": "localhost."}, 400, "HOST_REFUSED"),
        ({"origin": "http://evil.example"}, 403, "ORIGIN_REFUSED"),
        ({"origin": "null"}, 403, "ORIGIN_REFUSED"),
        ({"origin": "http://localhost:1420"}, 403, "ORIGIN_REFUSED"),
        ({"sec-fetch-site": "cross-site"}, 403, "ORIGIN_REFUSED"),
        ({"origin": TAURI, "authorization": "Bearer wrong"}, 401, "UNAUTHORIZED"),
        ({"sec-websocket-protocol": "freetoken.v1, freetoken.token.wrong"}, 401, "UNAUTHORIZED"),
    ],
)
@pytest.mark.parametrize("path", [PATH, "/api/v1/logs/ws"])
def test_a_handshake_is_refused_as_a_request_is(
    plain: Door, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    token = {} if code == "UNAUTHORIZED" else plain.bearer
    plain.refused(status, code, "GET", path, {**UPGRADE, **token, **headers})


@pytest.mark.parametrize("way", ["authorization", "own header", "subprotocols", "first message"])
def test_there_are_three_places_for_the_token(plain: Door, way: str) -> None:
    options: dict[str, Any] = {
        "authorization": {"additional_headers": plain.bearer},
        "own header": {"additional_headers": {"x-freetoken-token": plain.token}},
        "subprotocols": {"subprotocols": ["freetoken.v1", f"freetoken.token.{plain.token}"]},
        "first message": {"subprotocols": ["freetoken.v1"]},
    }[way]
    before = plain.ran
    with dial(plain, origin=TAURI, **options) as socket:
        if way == "first message":
            time.sleep(0.1)
            assert plain.ran == before  # accepted, and not let through
            socket.send(json.dumps({"token": plain.token}))
        socket.send("hello")
        assert socket.recv(timeout=5) == "hello"
        assert socket.subprotocol == (None if "header" in way or way == "authorization" else "freetoken.v1")
        assert plain.token not in str(socket.response.headers if socket.response else "")
    assert plain.ran == [*before, f"WS {PATH}"]


@pytest.mark.parametrize(
    "message",
    ['{"token": "wrong"}', '{"token": "{token}", "more": 1}', '"{token}"', "{token}", "{", "", b"\xff", b"{token}"],
)
def test_another_first_message_opens_nothing(plain: Door, message: str | bytes) -> None:
    before = plain.ran
    with dial(plain) as socket:
        socket.send(message.replace("{token}", plain.token) if isinstance(message, str) else message)
        assert close_code(socket) == 4401
    assert plain.ran == before


def test_a_token_in_the_url_or_in_a_cookie_is_none(plain: Door) -> None:
    before = plain.ran
    with dial(plain, f"{PATH}?token={plain.token}", additional_headers={"cookie": f"token={plain.token}"}) as socket:
        socket.send("hello")
        assert close_code(socket) == 4401
    assert plain.ran == before


def test_who_says_nothing_is_let_go_after_five_seconds(plain: Door) -> None:
    began = time.monotonic()
    with dial(plain) as socket:
        assert close_code(socket) == 4401
    assert 4.5 < time.monotonic() - began < 8


def test_only_so_many_may_wait_to_show_their_token(plain: Door) -> None:
    with ExitStack() as stack:
        waiting = [stack.enter_context(dial(plain)) for _ in range(UNPROVEN)]
        plain.refused(429, "TOO_MANY_STREAMS", "GET", PATH, UPGRADE)
        proven = stack.enter_context(dial(plain, additional_headers=plain.bearer))
        proven.send("hello")
        assert proven.recv(timeout=5) == "hello"
        waiting[0].send(json.dumps({"token": plain.token}))
        waiting[0].send("hello")
        assert waiting[0].recv(timeout=5) == "hello"
    with dial(plain) as again:
        again.send(json.dumps({"token": plain.token}))
        again.send("hello")
        assert again.recv(timeout=5) == "hello"


def test_a_message_has_a_largest_size(plain: Door) -> None:
    with dial(plain, additional_headers=plain.bearer) as socket:
        socket.send("x" * (MESSAGE - 1))
        assert len(socket.recv(timeout=5)) == MESSAGE - 1
        socket.send("x" * (MESSAGE + 1))
        assert close_code(socket) == 1009
    with dial(plain) as unproven:
        unproven.send("x" * (MESSAGE + 1))
        assert close_code(unproven) == 1009


def test_another_subprotocol_is_not_answered(plain: Door) -> None:
    with dial(plain, subprotocols=["graphql-ws"], additional_headers=plain.bearer) as socket:
        assert socket.subprotocol is None
