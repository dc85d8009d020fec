"""The event stream and the log over a WebSocket; what control.ControlClient.events does over server-sent events.

A lost connection is taken up again where it broke. The token goes in a header, which programs can set, and proxies of
the environment are not used. Does not know terminals. The library is imported when it is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from freetoken.client.discovery import Address
from freetoken.client.views import Event, Problem
from freetoken.core.errors import DaemonError, DaemonNotReachable, FreeTokenError

CONNECT_S = 3.0
SILENCE_S = 45.0  # a stream sends something every 15 s
RECONNECTS = 3  # in a row, without one new event between them
LARGEST = 16 << 20  # bytes of an event: a snapshot has everything in it
PROTOCOL = "freetoken.v1"
UNNUMBERED = frozenset({"stream.hello", "stream.gap", "stream.heartbeat"})  # nothing is resumed from these


def events(
    address: Address, *, after: str | None = None, types: Iterable[str] = (), subjects: Iterable[str] = ()
) -> Iterator[Event]:
    """Events of these types (prefixes) and subjects (whole), all where none are given; heartbeats are left out.

    Endless: the caller stops. Raises the typed error of a refusal, and DaemonNotReachable when the daemon is gone or
    connections break again and again without a new event.
    """
    return _follow(address, "/api/v1/events/ws", after, {"types": ",".join(types), "subjects": ",".join(subjects)})


def logs(
    address: Address, *, after: str | None = None, source: str | None = None, level: str | None = None
) -> Iterator[Event]:
    """log.line and log.dropped alone, the newest lines first as a snapshot. Otherwise as events()."""
    return _follow(address, "/api/v1/logs/ws", after, {"source": source, "level": level})


def _follow(address: Address, path: str, after: str | None, wanted: Mapping[str, str | None]) -> Iterator[Event]:
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

    failures = 0
    while True:
        query = urlencode({name: value for name, value in {**wanted, "after": after}.items() if value})
        try:
            for event in _connection(address, f"{path}?{query}"):
                if event.type == "stream.heartbeat":
                    continue
                if event.type not in UNNUMBERED:
                    failures, after = 0, f"{event.epoch}:{event.seq}"
                yield event
        except InvalidStatus as error:
            raise _refusal(error.response.status_code, bytes(error.response.body or b"")) from error
        except (OSError, TimeoutError, ConnectionClosed, InvalidHandshake) as error:
            failures += 1
            if failures > RECONNECTS or not address.running():
                detail = f"the daemon at {address.url} (pid {address.pid}) does not answer: {error}"
                raise DaemonNotReachable(detail, fixes=("ft daemon status", "ft daemon start")) from error
            time.sleep(0.2 * failures)


def _connection(address: Address, target: str) -> Iterator[Event]:
    """The events of one connection; ends by raising."""
    from websockets.sync.client import connect
    from websockets.typing import Subprotocol

    options: dict[str, Any] = {
        "additional_headers": {"authorization": f"Bearer {address.token}"},
        "subprotocols": [Subprotocol(PROTOCOL)],
        "compression": None,
        "proxy": None,
        "open_timeout": CONNECT_S,
        "max_size": LARGEST,
        "user_agent_header": "ft",
    }
    with connect("ws" + address.url.removeprefix("http") + target, **options) as socket:
        while True:
            yield _decode(socket.recv(timeout=SILENCE_S))


def _decode(message: str | bytes) -> Event:
    try:
        return msgspec.json.decode(message, type=Event)
    except msgspec.DecodeError as error:
        detail = f"the daemon sent an event that this ft does not understand: {error}"
        raise DaemonError(detail, fixes=("ft daemon stop, then ft daemon start with this version",)) from error


def _refusal(status: int, body: bytes) -> FreeTokenError:
    try:
        return msgspec.json.decode(body, type=Problem).error()
    except msgspec.DecodeError:
        return DaemonError(f"the daemon refused the event stream with {status}")
