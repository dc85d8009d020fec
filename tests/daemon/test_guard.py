"""Attacks over a real socket. The planted application records every request that reaches it: a refusal must not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from freetoken.core.errors import BindRefused
from freetoken.daemon.guard import CONTROL_BODY, OPEN_PATHS, Guard, Policy
from freetoken.settings.load import load
from tests.fakes.serving import Answer, ask, served

TOKEN, KEY = "t" * 64, "sk-local"
BEARER = {"authorization": f"Bearer {TOKEN}"}
JSON = {"content-type": "application/json"}
TAURI = "tauri://localhost"


class Planted:
    """Answers 200 to everything, after reading the body, and remembers what ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            self.ran.append(f"WS {scope['path']}")
            await receive()
            await send({"type": "websocket.accept"})
            return
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            raise RuntimeError("the client went away")
        self.ran.append(f"{scope['method']} {scope['path']}")
        kind = b"text/html" if scope["path"].endswith(".html") else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": b"{}"})


class Door:
    """A planted application behind a guard with these settings."""

    def __init__(self, port: int, planted: Planted) -> None:
        self.port, self.planted = port, planted

    def ask(self, method: str, path: str, headers: Any = None, body: bytes = b"") -> Answer:
        return ask(self.port, method, path, headers, body)

    def refused(self, status: int, code: str, method: str, path: str, headers: Any = None, body: bytes = b"") -> Answer:
        before = list(self.planted.ran)
        answer = self.ask(method, path, headers, body)
        assert (answer.status, self.planted.ran) == (status, before), answer.body
        shown = answer.json["error"]["freetoken_code"] if "error" in answer.json else answer.json["code"]
        assert shown == code
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert TOKEN.encode() not in answer.body and KEY.encode() not in answer.body
        return answer

    def passes(self, method: str, path: str, headers: Any = None, body: bytes = b"") -> Answer:
        answer = self.ask(method, path, headers, body)
        assert answer.status == 200, answer.body
        assert self.planted.ran[-1] == f"{method} {path}"
        return answer


def policy(port: int = 1919, environ: dict[str, str] | None = None, **flags: object) -> Policy:
    loaded = load({"home": "/nowhere", **flags}, environ or {})
    return Policy.of(loaded.settings, TOKEN, port)


@pytest.fixture(scope="module")
def plain() -> Iterator[Door]:
    planted = Planted()
    with served(Guard(planted, policy())) as port:
        yield Door(port, planted)


@pytest.fixture(scope="module")
def keyed() -> Iterator[Door]:
    planted = Planted()
    guard = Guard(
        planted, policy(environ={"FREETOKEN_API_KEY": KEY}, cors_origins="*,app://obsidian.md", dev_origins=True)
    )
    with served(guard) as port:
        yield Door(port, planted)


# ── line 1: the address ─────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_beyond_this_machine_needs_a_key(host: str) -> None:
    with pytest.raises(BindRefused, match="API key"):
        policy(host=host)
    assert policy(host=host, environ={"FREETOKEN_API_KEY": KEY}).any_address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_loopback_needs_none(host: str) -> None:
    assert not policy(host=host).any_address


# ── line 2: Host ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("host", ["127.0.0.1:1919", "localhost", "LOCALHOST:80", "[::1]:1919", "[::1]"])
def test_our_names_pass_with_any_port(plain: Door, host: str) -> None:
    plain.passes("GET", "/health", {"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:1919",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "[::1]evil",
        "127.0.0.1:x",
        "",
        "10.0.0.1",
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/health"), ("POST", "/api/v1/daemon/shutdown"), ("GET", "/docs")]
)
def test_another_host_is_refused_everywhere(plain: Door, host: str, method: str, path: str) -> None:
    plain.refused(400, "HOST_REFUSED", method, path, {"host": host, **BEARER})


def test_names_of_the_settings_pass() -> None:
    planted = Planted()
    with served(Guard(planted, policy(allowed_hosts="box.local"))) as port:
        Door(port, planted).passes("GET", "/health", {"host": "Box.Local:1919"})


def test_bound_beyond_loopback_a_literal_address_passes_and_a_name_does_not() -> None:
    planted = Planted()
    with served(Guard(planted, policy(host="0.0.0.0", environ={"FREETOKEN_API_KEY": KEY}))) as port:
        Door(port, planted).passes("GET", "/health", {"host": "10.0.0.1:1919"})
        Door(port, planted).refused(400, "HOST_REFUSED", "GET", "/health", {"host": "evil.example"})


# ── lines 3 to 5: Origin ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "origin",
    [TAURI, "http://tauri.localhost", "https://tauri.localhost", "http://127.0.0.1:1919", "http://localhost:1919"],
)
def test_the_apps_origins_pass_and_may_read_the_answer(plain: Door, origin: str) -> None:
    answer = plain.passes("GET", "/health", {"origin": origin})
    assert answer.headers["access-control-allow-origin"] == origin
    assert "origin" in answer.headers["vary"]


@pytest.mark.parametrize(
    "origin",
    ["null", "http://evil.example", "tauri://localhost.evil.example", "http://localhost:1420", "https://127.0.0.1:1919",
     "http://127.0.0.1:1", "TAURI://LOCALHOST", "tauri://localhost, http://evil.example", ""],
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/health")]
)
def test_another_origin_is_refused_before_the_handler(plain: Door, origin: str, method: str, path: str) -> None:
    answer = plain.refused(403, "ORIGIN_REFUSED", method, path, {"origin": origin, **JSON})
    assert "access-control-allow-origin" not in answer.headers


def test_two_origins_are_not_one(plain: Door) -> None:
    plain.refused(403, "ORIGIN_REFUSED", "GET", "/v1/models", [("origin", TAURI), ("origin", "http://evil.example")])


def test_a_hostile_page_cannot_shut_the_daemon_down_without_a_body(plain: Door) -> None:
    hostile = {"origin": "http://evil.example"}
    plain.refused(403, "ORIGIN_REFUSED", "POST", "/api/v1/daemon/shutdown", hostile)
    plain.refused(403, "ORIGIN_REFUSED", "POST", "/api/v1/daemon/shutdown", {**hostile, **BEARER})


def test_a_cross_site_request_without_an_origin_is_refused(plain: Door) -> None:
    plain.refused(403, "ORIGIN_REFUSED", "GET", "/v1/models", {"sec-fetch-site": "cross-site"})
    plain.passes("GET", "/v1/models", {"sec-fetch-site": "cross-site", "origin": TAURI})
    plain.passes("GET", "/v1/models", {"sec-fetch-site": "same-origin"})


def test_origins_of_the_settings_and_the_star_which_stops_at_v1(keyed: Door) -> None:
    credentials = {"authorization": f"Bearer {KEY}"}
    keyed.passes("GET", "/v1/models", {"origin": "app://obsidian.md", **credentials})
    keyed.passes("GET", "/v1/models", {"origin": "http://anything.example", **credentials})
    keyed.passes("GET", "/api/v1/engine", {"origin": "http://localhost:1420", **BEARER})
    keyed.refused(403, "ORIGIN_REFUSED", "GET", "/api/v1/engine", {"origin": "http://anything.example", **BEARER})
    keyed.refused(403, "ORIGIN_REFUSED", "GET", "/v1/models", {"origin": "null", **credentials})


# ── line 7: preflight ───────────────────────────────────────────────────────────────────────────────────────────────
def test_preflight_of_an_allowed_origin_never_reaches_a_handler(plain: Door) -> None:
    before = list(plain.planted.ran)
    answer = plain.ask(
        "OPTIONS",
        "/v1/chat/completions",
        {
            "origin": TAURI,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, x-api-key, anthropic-version",
            "access-control-request-private-network": "true",
        },
    )
    assert (answer.status, plain.planted.ran) == (204, before)
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["access-control-allow-headers"] == "authorization, x-api-key, anthropic-version"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in answer.headers


def test_preflight_of_another_origin_is_refused(plain: Door) -> None:
    headers = {
        "origin": "http://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    answer = plain.refused(403, "ORIGIN_REFUSED", "OPTIONS", "/v1/models", headers)
    assert "access-control-allow-private-network" not in answer.headers


# ── line 6: content type ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_what_a_form_can_send_is_refused(plain: Door, kind: str | None, method: str) -> None:
    headers = {"content-type": kind} if kind else {}
    plain.refused(415, "CONTENT_TYPE_REFUSED", method, "/v1/chat/completions", headers, b"{}")


def test_json_or_the_token_passes(plain: Door) -> None:
    plain.passes("POST", "/v1/chat/completions", {"content-type": "application/json; charset=utf-8"}, b"{}")
    plain.passes("POST", "/api/v1/daemon/shutdown", BEARER)


# ── lines 11 and 12: token and key ──────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}, {"authorization": TOKEN},
     {"x-freetoken-token": TOKEN[:-1]}, {"cookie": f"token={TOKEN}"}, {"authorization": "Bearer ÿ"},
     {"authorization": "Bearer "}],
)  # fmt: skip
@pytest.mark.parametrize(
    "path", ["/api/v1/engine", "/api/v1/nothing", "/api", "/api/v2/x", f"/api/v1/engine?token={TOKEN}"]
)
def test_the_control_api_needs_the_token(plain: Door, headers: dict[str, str], path: str) -> None:
    answer = plain.refused(401, "UNAUTHORIZED", "GET", path, headers)
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"


def test_either_header_opens_it(plain: Door) -> None:
    plain.passes("GET", "/api/v1/engine", BEARER)
    plain.passes("GET", "/api/v1/engine", {"x-freetoken-token": TOKEN})
    assert plain.ask("GET", "/api/v1/engine", [*BEARER.items(), *BEARER.items()]).status == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_open_paths_need_nothing(keyed: Door, path: str) -> None:
    keyed.passes("GET", path)


def test_v1_is_open_until_a_key_is_set(plain: Door, keyed: Door) -> None:
    plain.passes("GET", "/v1/models")
    answer = keyed.refused(401, "UNAUTHORIZED", "GET", "/v1/models")
    assert answer.json["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"].startswith("Bearer")
    for headers in ({"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}, BEARER):
        keyed.passes("GET", "/v1/models", headers)
    keyed.refused(401, "UNAUTHORIZED", "GET", "/api/v1/engine", {"authorization": f"Bearer {KEY}"})


def test_an_app_can_read_why_it_was_refused(plain: Door) -> None:
    answer = plain.refused(401, "UNAUTHORIZED", "GET", "/api/v1/engine", {"origin": TAURI})
    assert answer.headers["access-control-allow-origin"] == TAURI


def test_the_policy_does_not_print_its_secrets() -> None:
    assert TOKEN not in repr(policy()) and TOKEN not in str(policy())


# ── line 8: sizes ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_declared_size_is_refused_before_it_is_sent(plain: Door) -> None:
    headers = {**BEARER, **JSON, "content-length": str(CONTROL_BODY + 1)}
    plain.refused(413, "BODY_TOO_LARGE", "POST", "/api/v1/engine/load", headers)


def test_a_size_that_is_not_declared_is_counted(plain: Door) -> None:
    piece = b"%x\r\n" % (1 << 16) + b" " * (1 << 16) + b"\r\n"
    body = piece * (CONTROL_BODY // (1 << 16) + 1) + b"0\r\n\r\n"
    headers = {**BEARER, **JSON, "transfer-encoding": "chunked"}
    plain.refused(413, "BODY_TOO_LARGE", "POST", "/api/v1/engine/load", headers, body)
    plain.passes("POST", "/api/v1/engine/load", headers, piece + b"0\r\n\r\n")


def test_inference_takes_more(plain: Door) -> None:
    plain.passes("POST", "/v1/chat/completions", JSON, b" " * (CONTROL_BODY + 1))


# ── line 9: what every answer carries ───────────────────────────────────────────────────────────────────────────────
def test_answers_are_not_sniffed_stored_or_framed(plain: Door) -> None:
    answer = plain.passes("GET", "/page.html")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-request-id"].startswith("req_")


# ── WebSocket handshakes pass the same checks ───────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": TAURI, **BEARER}, 101),
        ({**BEARER}, 101),
        ({"origin": "http://evil.example", **BEARER}, 403),
        ({"origin": "null", **BEARER}, 403),
        ({"host": "evil.example", **BEARER}, 403),
        ({"origin": TAURI}, 403),
    ],
)
def test_a_websocket_handshake_is_guarded(plain: Door, headers: dict[str, str], status: int) -> None:
    before = len(plain.planted.ran)
    upgrade = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    answer = plain.ask("GET", "/api/v1/events/ws", {**upgrade, **headers})
    assert answer.status == status
    assert (len(plain.planted.ran) > before) == (status == 101)
