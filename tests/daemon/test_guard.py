"""The guard of a real daemon, attacked over sockets. What is refused must not have reached the application.

Here: the address, Host, Origin, preflights, content types, sizes, headers, token and key; WebSockets are in
test_guard_websocket.py. Options, programs and the model's files have their tests where they are handled: a typed schema
for options (test_daemon.py, tests/settings), the engine's command line (test_daemon.py), headers of model files
(tests/catalog), templates (tests/text), downloads (tests/downloads).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from websockets.sync.client import connect

from freetoken.core.errors import BindRefused
from freetoken.daemon.guard import CONTROL_BODY, OPEN_PATHS
from freetoken.daemon.policy import Policy
from freetoken.settings.load import load
from tests.fakes.door import JSON, KEY, Door, door

TAURI = "tauri://localhost"
TOKEN = "t" * 64
MUTATING = ("POST", "PUT", "PATCH", "DELETE")


def policy(environ: dict[str, str] | None = None, **flags: object) -> Policy:
    return Policy.of(load({"home": "/nowhere", **flags}, environ or {}).settings, TOKEN, 1919)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with door(tmp_path_factory.mktemp("plain") / "home") as found:
        yield found


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    flags = ("--cors-origins", "*,app://obsidian.md", "--dev-origins")
    with door(tmp_path_factory.mktemp("keyed") / "home", *flags, environ={"FREETOKEN_API_KEY": KEY}) as found:
        yield found


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
@pytest.mark.parametrize("host", ["127.0.0.1:1919", "localhost", "LOCALHOST:80", "LocalHost", "[::1]:1919", "[::1]"])
def test_our_names_pass_with_any_port(plain: Door, host: str) -> None:
    plain.passes("GET", "/health", {"host": host})


@pytest.mark.parametrize(
    "host",
    ["evil.example:1919", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "localhost.",
     "127.0.0.1.", "[::1]evil", "[::1", "::1", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::1%25lo]", "127.0.0.1:x",
     "127.0.0.1:", "127.0.0.1:123456", "localhost:80@evil.example", "evil.example@localhost", "127.0.0.1/live?x=",
     "127.1", "2130706433", "0x7f000001", "0.0.0.0", "[::]", "10.0.0.1", "localhost,evil.example", "xn--lcalhost-54a",
     ""],
)  # fmt: skip
def test_any_other_host_is_refused(plain: Door, host: str) -> None:
    plain.refused(400, "HOST_REFUSED", "GET", "/health", {"host": host})


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("HEAD", "/live"), ("POST", "/api/v1/daemon/shutdown"), ("GET", "/docs"),
     ("GET", "/openapi.json"), ("GET", "/v1/models"), ("OPTIONS", "/v1/models"), ("GET", "/")],
)  # fmt: skip
def test_a_rebound_name_is_refused_on_every_path_and_method_even_with_the_token(
    plain: Door, method: str, path: str
) -> None:
    plain.refused(400, "HOST_REFUSED", method, path, {"host": "evil.example:1919", **plain.bearer})


def test_a_host_that_is_missing_or_sent_twice_is_refused(plain: Door) -> None:
    before = plain.ran
    twice = "host: 127.0.0.1\r\nhost: evil.example\r\n"
    for version, hosts in (("1.1", ""), ("1.0", ""), ("1.1", twice), ("1.0", twice)):
        answer = plain.raw(f"GET /v1/models HTTP/{version}\r\n{hosts}connection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert plain.ran == before


@pytest.mark.parametrize("target", ["http://evil.example/v1/models", "http://127.0.0.1/api/v1/engine", "*"])
def test_a_target_that_is_no_path_is_refused(plain: Door, target: str) -> None:
    method = "OPTIONS" if target == "*" else "GET"
    plain.refused(400, "HOST_REFUSED", method, target, plain.bearer)


def test_what_a_proxy_would_say_is_not_believed(plain: Door) -> None:
    said = {"x-forwarded-host": "localhost", "forwarded": "host=localhost", "x-forwarded-for": "127.0.0.1"}
    plain.refused(400, "HOST_REFUSED", "GET", "/health", {"host": "evil.example", **said})
    plain.passes("GET", "/health", {"x-forwarded-host": "evil.example", "x-forwarded-proto": "https"})


def test_names_of_the_settings_pass(tmp_path: Path) -> None:
    with door(tmp_path / "home", "--allowed-hosts", "box.local") as named:
        named.passes("GET", "/health", {"host": "Box.Local:1919"})
        named.refused(400, "HOST_REFUSED", "GET", "/health", {"host": "other.local"})


def test_bound_beyond_loopback_a_literal_address_passes_and_a_name_does_not(tmp_path: Path) -> None:
    with door(tmp_path / "home", "--host", "0.0.0.0", environ={"FREETOKEN_API_KEY": KEY}) as open_door:
        open_door.passes("GET", "/health", {"host": "10.0.0.1:1919"})
        open_door.refused(400, "HOST_REFUSED", "GET", "/health", {"host": "evil.example"})
        open_door.refused(401, "UNAUTHORIZED", "GET", "/v1/models", {"host": "10.0.0.1:1919"})


# ── lines 3 to 5: Origin ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "origin",
    [TAURI, "http://tauri.localhost", "https://tauri.localhost", "http://127.0.0.1:{port}", "http://localhost:{port}",
     "http://[::1]:{port}"],
)  # fmt: skip
def test_the_apps_origins_pass_and_may_read_the_answer(plain: Door, origin: str) -> None:
    origin = origin.format(port=plain.port)
    answer = plain.passes("GET", "/health", {"origin": origin})
    assert answer.headers["access-control-allow-origin"] == origin
    assert "origin" in answer.headers["vary"]


@pytest.mark.parametrize(
    "origin",
    ["null", "NULL", "http://evil.example", "tauri://localhost.evil.example", "tauri://localhost/", "file://",
     "http://localhost:1420", "https://127.0.0.1:1919", "http://127.0.0.1:1", "http://localhost", "TAURI://LOCALHOST",
     "tauri://localhost, http://evil.example", "*", ""],
)  # fmt: skip
def test_any_other_origin_is_refused_before_the_application(plain: Door, origin: str) -> None:
    answer = plain.refused(403, "ORIGIN_REFUSED", "GET", "/v1/models", {"origin": origin})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", *MUTATING])
@pytest.mark.parametrize("path", ["/health", "/v1/chat/completions", "/api/v1/daemon/shutdown", "/nothing"])
def test_a_hostile_origin_is_refused_with_every_method_and_even_with_the_token(
    plain: Door, method: str, path: str
) -> None:
    plain.refused(403, "ORIGIN_REFUSED", method, path, {"origin": "http://evil.example", **JSON, **plain.bearer})


def test_two_origins_are_not_one(plain: Door) -> None:
    plain.refused(403, "ORIGIN_REFUSED", "GET", "/v1/models", [("origin", TAURI), ("origin", "http://evil.example")])


def test_a_hostile_page_cannot_shut_the_daemon_down_without_a_body(plain: Door) -> None:
    hostile = {"origin": "http://evil.example"}
    plain.refused(403, "ORIGIN_REFUSED", "POST", "/api/v1/daemon/shutdown", hostile)
    plain.refused(403, "ORIGIN_REFUSED", "POST", "/api/v1/daemon/shutdown", {**hostile, **plain.bearer})
    assert plain.daemon.process.poll() is None


def test_a_cross_site_request_without_an_origin_is_refused(plain: Door) -> None:
    plain.refused(403, "ORIGIN_REFUSED", "GET", "/v1/models", {"sec-fetch-site": "cross-site"})
    plain.passes("GET", "/v1/models", {"sec-fetch-site": "cross-site", "origin": TAURI})
    plain.passes("GET", "/v1/models", {"sec-fetch-site": "same-origin"})


def test_origins_of_the_settings_and_the_star_which_stops_at_v1(keyed: Door) -> None:
    credentials = {"authorization": f"Bearer {KEY}"}
    keyed.passes("GET", "/v1/models", {"origin": "app://obsidian.md", **credentials})
    keyed.passes("GET", "/v1/models", {"origin": "http://anything.example", **credentials})
    keyed.passes("GET", "/api/v1/engine", {"origin": "http://localhost:1420", **keyed.bearer})
    keyed.refused(403, "ORIGIN_REFUSED", "GET", "/api/v1/engine", {"origin": "http://anything.example", **keyed.bearer})
    keyed.refused(403, "ORIGIN_REFUSED", "GET", "/v1/models", {"origin": "null", **credentials})


# ── line 7: preflight ───────────────────────────────────────────────────────────────────────────────────────────────
def test_preflight_of_an_allowed_origin_never_reaches_a_handler(plain: Door) -> None:
    before = plain.ran
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
    assert (answer.status, plain.ran) == (204, before)
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
    plain.passes("POST", "/api/v1/daemon/shutdown", plain.bearer)


# ── lines 11 and 12: token and key ──────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic {token}"}, {"authorization": "{token}"},
     {"x-freetoken-token": "{token}x"}, {"cookie": "token={token}"}, {"authorization": "Bearer ÿ"},
     {"authorization": "Bearer "}, {"sec-websocket-protocol": "freetoken.v1, freetoken.token.{token}"}],
)  # fmt: skip
def test_the_control_api_needs_the_token(plain: Door, headers: dict[str, str]) -> None:
    given = {name: value.format(token=plain.token) for name, value in headers.items()}
    answer = plain.refused(401, "UNAUTHORIZED", "GET", "/api/v1/engine", given)
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    ["/api", "/api/", "/api/v1/nothing", "/api/v2/x", "/api/v1/engine?token={token}", "/api%2fv1/engine",
     "/%61pi/v1/engine", "/api/v1/../live", "/api/v1/live/", "/api/v1/planted/ran"],
)  # fmt: skip
def test_no_spelling_of_a_control_path_is_forgotten(plain: Door, path: str) -> None:
    plain.refused(401, "UNAUTHORIZED", "GET", path.format(token=plain.token))


def test_a_prefix_of_the_token_opens_nothing(plain: Door) -> None:
    for part in (plain.token[:-1], plain.token[:1], plain.token.upper() + "A", plain.token * 2):
        plain.refused(401, "UNAUTHORIZED", "GET", "/api/v1/engine", {"authorization": f"Bearer {part}"})


def test_either_header_opens_it_and_a_repeated_one_does_not(plain: Door) -> None:
    plain.passes("GET", "/api/v1/engine", plain.bearer)
    plain.passes("GET", "/api/v1/engine", {"x-freetoken-token": plain.token})
    assert plain.ask("GET", "/api/v1/engine", [*plain.bearer.items(), *plain.bearer.items()]).status == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_open_paths_need_nothing(keyed: Door, path: str) -> None:
    keyed.passes("GET", path)


def test_v1_is_open_until_a_key_is_set(plain: Door, keyed: Door) -> None:
    plain.passes("GET", "/v1/models")
    answer = keyed.refused(401, "UNAUTHORIZED", "GET", "/v1/models")
    assert answer.json["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"].startswith("Bearer")
    for headers in ({"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}, keyed.bearer):
        keyed.passes("GET", "/v1/models", headers)
    keyed.refused(401, "UNAUTHORIZED", "GET", "/api/v1/engine", {"authorization": f"Bearer {KEY}"})


def test_an_app_can_read_why_it_was_refused(plain: Door) -> None:
    answer = plain.refused(401, "UNAUTHORIZED", "GET", "/api/v1/engine", {"origin": TAURI})
    assert answer.headers["access-control-allow-origin"] == TAURI


def test_the_policy_does_not_print_its_secrets() -> None:
    assert TOKEN not in repr(policy()) and TOKEN not in str(policy())


# ── line 8: sizes ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_declared_size_is_refused_before_it_is_sent(plain: Door) -> None:
    headers = {**plain.bearer, **JSON, "content-length": str(CONTROL_BODY + 1)}
    plain.refused(413, "BODY_TOO_LARGE", "POST", "/api/v1/engine/load", headers)


def test_a_size_that_is_not_declared_is_counted(plain: Door) -> None:
    piece = b"%x\r\n" % (1 << 16) + b" " * (1 << 16) + b"\r\n"
    body = piece * (CONTROL_BODY // (1 << 16) + 1) + b"0\r\n\r\n"
    headers = {**plain.bearer, **JSON, "transfer-encoding": "chunked"}
    plain.refused(413, "BODY_TOO_LARGE", "POST", "/api/v1/engine/load", headers, body)
    plain.passes("POST", "/api/v1/engine/load", headers, piece + b"0\r\n\r\n")


def test_inference_takes_more(plain: Door) -> None:
    plain.passes("POST", "/v1/chat/completions", JSON, b" " * (CONTROL_BODY + 1))


# ── line 9: what every answer carries ───────────────────────────────────────────────────────────────────────────────
def test_answers_are_not_sniffed_stored_or_framed(plain: Door) -> None:
    answer = plain.passes("GET", "/page.html")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert re.fullmatch("req_[0-9a-f]{16}", answer.headers["x-request-id"])
    assert "server" not in answer.headers


def test_the_log_names_no_url_and_no_token(plain: Door) -> None:
    plain.ask("GET", f"/api/v1/engine?token={plain.token}", plain.bearer)
    url = f"ws://127.0.0.1:{plain.port}/api/v1/events/ws?token={plain.token}"
    with connect(url, additional_headers=plain.bearer, proxy=None) as socket:
        socket.send("hello")
        assert socket.recv(timeout=5) == "hello"
    written = (plain.daemon.home / "logs" / "daemon.log").read_text()
    assert "listening at" in written and plain.token not in written and "/api/v1/e" not in written


def test_the_token_is_readable_by_its_owner_only_and_in_no_argument(plain: Door) -> None:
    assert (plain.daemon.home / "token").stat().st_mode & 0o777 == 0o600
    assert plain.daemon.home.stat().st_mode & 0o777 == 0o700
    assert plain.token not in " ".join(psutil.Process(plain.daemon.process.pid).cmdline())
