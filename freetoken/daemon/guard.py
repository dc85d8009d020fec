"""Who may speak to the daemon: one layer in front of all routing, for HTTP and WebSocket alike.

Checks, in this order: Host, Origin, Sec-Fetch-Site, token or key, content type, size. A web page that the user visits
can reach a port on this machine; what it cannot do is forge the Host of a rebound name, hide its Origin, or know the
token (docs/control-api.md, Guard). Knows paths by prefix only; does not know routes, so it cannot be forgotten on one.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from freetoken.api.errors import error_body
from freetoken.core.errors import (
    BodyTooLarge,
    ContentTypeRefused,
    FreeTokenError,
    HostRefused,
    OriginRefused,
    TooManyStreams,
    Unauthorized,
)
from freetoken.daemon import handshake
from freetoken.daemon.errors import MEDIA_TYPE, problem
from freetoken.daemon.policy import Policy

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

OPEN_PATHS = frozenset({"/live", "/health", "/api/v1/live"})  # no token or key; still behind Host and Origin
CONTROL_BODY = 1 << 20  # bytes
INFERENCE_BODY = 64 << 20  # bytes
MESSAGE = 64 << 10  # bytes of a WebSocket message from a client
UNPROVEN = 16  # WebSocket clients that have not sent their token yet

_MUTATING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::[0-9]{1,5})?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9_, -]{0,1000}")
_METHODS = b"GET, POST, PUT, PATCH, DELETE, OPTIONS"
_EXPOSED = b"x-request-id, retry-after, www-authenticate"


class Call:
    """The facts of one HTTP request or WebSocket handshake that the checks look at."""

    def __init__(self, scope: Scope) -> None:
        self._headers: list[Header] = list(scope["headers"])
        self.websocket = scope["type"] == "websocket"
        self.method: str = "GET" if self.websocket else scope["method"]
        self.path: str = scope["path"]
        self.control = self.path == "/api" or self.path.startswith("/api/")
        self.inference = self.path == "/v1" or self.path.startswith("/v1/")
        self.origin = self.one(b"origin")
        self.speaks_ours, self._token = handshake.offered(self._joined(b"sec-websocket-protocol"))
        self.request_id = f"req_{secrets.token_hex(8)}"

    def one(self, name: bytes) -> bytes | None:
        """The header's value; None where absent, and an impossible value where it was sent more than once."""
        values = [value for key, value in self._headers if key == name]
        return None if not values else values[0].strip() if len(values) == 1 else b"\0repeated"

    def _joined(self, name: bytes) -> bytes | None:
        """A header that may be sent in pieces (RFC 9110, section 5.3)."""
        return b",".join(value for key, value in self._headers if key == name) if self.websocket else None

    @property
    def bearer(self) -> bytes | None:
        scheme, _, credential = (self.one(b"authorization") or b"").partition(b" ")
        return credential.strip() if scheme.lower() == b"bearer" else None

    @property
    def credentials(self) -> list[bytes]:
        found = (self.bearer, self.one(b"x-freetoken-token"), self.one(b"x-api-key"), self._token)
        return [credential for credential in found if credential]

    @property
    def proves_later(self) -> bool:
        """A WebSocket client that showed nothing, as a browser's may: its first message has to."""
        return self.websocket and self.control and not self.credentials

    @property
    def body_limit(self) -> int:
        return INFERENCE_BODY if self.inference else CONTROL_BODY


class Guard:
    """The layer: what passes goes to `app`, the rest gets its error and `app` never sees it."""

    def __init__(self, app: App, policy: Policy) -> None:
        self._app = app
        self._policy = policy
        self._unproven = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        call = Call(scope)
        cors = self._cors(call)
        try:
            self._check(call)
        except FreeTokenError as error:
            await _refuse(call, error, cors, send)
            return
        if _is_preflight(call):
            await _send_empty(send, 204, cors + _preflight_headers(call))
            return
        scope.setdefault("state", {})["request_id"] = call.request_id
        if call.websocket:
            await self._run_websocket(call, scope, receive, send)
        else:
            await _Exchange(call, cors, receive, send).run(self._app, scope)

    async def _run_websocket(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """The application runs once the token is there; the subprotocol is answered where ours was offered."""
        exchange = _Handshake(call, receive, send)
        if call.proves_later:
            self._unproven += 1
            try:
                proven = await exchange.first_message(self._policy.token)
            finally:
                self._unproven -= 1
            if not proven:
                return
        await self._app(scope, exchange.receive, exchange.send)

    def _check(self, call: Call) -> None:
        if not call.path.startswith("/"):  # absolute-form and asterisk-form: the target would be its own Host
            raise HostRefused("The request target must be a path.", fixes=("Send the path alone, such as /live",))
        self._check_host(call)
        self._check_origin(call)
        if not _is_preflight(call):  # which carries no credentials, by the standard
            self._check_credentials(call)
            _check_content_type(call, self._has_token(call))
            _check_length(call)

    def _check_host(self, call: Call) -> None:
        raw = call.one(b"host") or b""
        match = _HOST.fullmatch(raw)
        name = match[1].decode("ascii").lower() if match else ""
        if name in self._policy.hosts or (self._policy.any_address and _is_address(name)):
            return
        shown = raw.decode("latin-1")[:80]
        raise HostRefused(
            f"The Host header {shown!r} is not a name of this daemon.",
            fixes=("Call it as 127.0.0.1 or localhost", "Add the name to the setting allowed_hosts"),
        )

    def _check_origin(self, call: Call) -> None:
        if call.origin is None:
            if (call.one(b"sec-fetch-site") or b"").lower() == b"cross-site":
                raise OriginRefused("A page of another site sent this request without saying which.")
            return
        if not self._allows(call):
            shown = call.origin.decode("latin-1")[:120]
            raise OriginRefused(
                f"The web origin {shown!r} may not use this API.", fixes=("Allow it with --cors-origins",)
            )

    def _allows(self, call: Call) -> bool:
        origin = (call.origin or b"").decode("latin-1")
        if origin in self._policy.origins:
            return True
        return self._policy.any_origin and call.inference and origin != "null" and "\0" not in origin

    def _cors(self, call: Call) -> list[Header]:
        if call.origin is None or not self._allows(call):
            return []
        return [
            (b"access-control-allow-origin", call.origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]

    def _check_credentials(self, call: Call) -> None:
        if call.path in OPEN_PATHS:
            return
        if call.proves_later:
            if self._unproven >= UNPROVEN:
                raise TooManyStreams(f"{UNPROVEN} clients have connected and not sent their token yet.")
            return
        if call.control and not self._has_token(call):
            raise Unauthorized(
                "The control API needs the token of this daemon.",
                fixes=("Send the content of the file token in the state folder as Authorization: Bearer",),
            )
        key = self._policy.api_key
        if call.inference and key is not None and not (_holds(call, key) or self._has_token(call)):
            raise Unauthorized("This server needs an API key.", fixes=("Send it as Authorization: Bearer",))

    def _has_token(self, call: Call) -> bool:
        return _holds(call, self._policy.token)


class _Exchange:
    """One request on its way: counts the body, adds headers to the answer, cuts off what is too large."""

    def __init__(self, call: Call, cors: list[Header], receive: Receive, send: Send) -> None:
        self._call, self._cors, self._receive, self._send = call, cors, receive, send
        self._received = 0
        self._started = False
        self._cut = False

    async def run(self, app: App, scope: Scope) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if not self._cut:  # else: it is the application's surprise at a body that we ended, already answered
                raise

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request" or self._cut:
            return message
        self._received += len(message.get("body", b""))
        if self._received <= self._call.body_limit:
            return message
        if not self._started:
            await _refuse(self._call, _too_large(self._call), self._cors, self._send)
        self._cut = True
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._cut:
            return
        if message["type"] == "http.response.start":
            self._started = True
            message = {**message, "headers": _with_safety(list(message["headers"]), self._call, self._cors)}
        await self._send(message)


class _Handshake:
    """One WebSocket on its way: the guard may have accepted it already, to hear the token."""

    def __init__(self, call: Call, receive: Receive, send: Send) -> None:
        self._call, self._receive, self._send = call, receive, send
        self._accepted = self._begun = False

    async def first_message(self, token: str) -> bool:
        """Accepts, and waits for the token. False, and closed, where it does not come or is wrong."""
        await self._receive()  # websocket.connect
        await self.send({"type": "websocket.accept"})
        self._accepted = True
        try:
            message = await asyncio.wait_for(self._receive(), handshake.FIRST_MESSAGE_S)
        except TimeoutError:
            message = {}
        shown = handshake.token_in(message.get("text") or message.get("bytes"))
        if shown is not None and hmac.compare_digest(shown, token.encode()):
            return True
        if message.get("type") != "websocket.disconnect":
            await self._send({"type": "websocket.close", "code": handshake.REFUSED, "reason": Unauthorized.code})
        return False

    async def receive(self) -> Message:
        """What the client says; for the application it begins with the connection, whatever the guard has heard."""
        if self._accepted and not self._begun:
            self._begun = True
            return {"type": "websocket.connect"}
        return await self._receive()

    async def send(self, message: Message) -> None:
        if message["type"] == "websocket.accept":
            if self._accepted:
                return
            if self._call.speaks_ours:
                message = {**message, "subprotocol": handshake.PROTOCOL}
        await self._send(message)


def _holds(call: Call, secret: str) -> bool:
    """Whether any credential is `secret`; every comparison takes the same time."""
    expected = secret.encode()
    return any([hmac.compare_digest(credential, expected) for credential in call.credentials])  # noqa: C419


def _check_content_type(call: Call, has_token: bool) -> None:
    """A form of a hostile page can send anything but JSON, and no header of ours, without asking first."""
    if call.method not in _MUTATING or call.websocket or has_token:
        return
    kind = (call.one(b"content-type") or b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ContentTypeRefused(
            f"The body has the content type {kind.decode('latin-1')[:60]!r}.",
            fixes=("Send Content-Type: application/json",),
        )


def _check_length(call: Call) -> None:
    declared = call.one(b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > call.body_limit:
        raise _too_large(call)


def _too_large(call: Call) -> BodyTooLarge:
    limit = call.body_limit
    return BodyTooLarge(f"The body is larger than the {limit >> 20} MiB of this route.", numbers={"limit_bytes": limit})


def _is_preflight(call: Call) -> bool:
    requested = call.one(b"access-control-request-method")
    return call.method == "OPTIONS" and call.origin is not None and requested is not None


def _preflight_headers(call: Call) -> list[Header]:
    requested = call.one(b"access-control-request-headers") or b""
    headers = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", b"600"),
    ]
    if requested and _HEADER_NAMES.fullmatch(requested):
        headers.append((b"access-control-allow-headers", requested))
    if (call.one(b"access-control-request-private-network") or b"").lower() == b"true":
        headers.append((b"access-control-allow-private-network", b"true"))
    return headers


def _with_safety(headers: list[Header], call: Call, cors: Iterable[Header]) -> list[Header]:
    present = {name.lower(): value for name, value in headers}
    safe = [*headers, *cors, (b"x-content-type-options", b"nosniff")]
    defaults = ((b"cache-control", b"no-store"), (b"x-request-id", call.request_id.encode()))
    safe += [header for header in defaults if header[0] not in present]
    if present.get(b"content-type", b"").startswith(b"text/html"):
        safe.append((b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"))
    return safe


async def _refuse(call: Call, error: FreeTokenError, cors: list[Header], send: Send) -> None:
    """The error as the answer; a WebSocket handshake is answered over HTTP too (ASGI, WebSocket Denial Response)."""
    if call.inference:
        body, kind = msgspec.json.encode(error_body(error)), "application/json"
    else:
        body = msgspec.json.encode(problem(error, instance=call.path, request_id=call.request_id))
        kind = MEDIA_TYPE
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    if error.http_status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="freetoken"'))
    headers = _with_safety(headers, call, cors)
    kind = "websocket.http.response" if call.websocket else "http.response"
    await send({"type": f"{kind}.start", "status": error.http_status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


async def _send_empty(send: Send, status: int, headers: list[Header]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
