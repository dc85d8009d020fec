"""The door of a real daemon whose application only records: what is refused must not have reached it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.planted import RAN
from tests.fakes.running import JSON, Daemon, running
from tests.fakes.serving import Answer, ask

KEY = "sk-local"
Headers = list[tuple[str, str]] | dict[str, str] | None


class Door:
    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.port = daemon, daemon.port
        self.token = daemon.token["authorization"].removeprefix("Bearer ")
        self.bearer = daemon.token

    @property
    def ran(self) -> list[str]:
        found: list[str] = ask(self.port, "GET", RAN).json
        return found

    def ask(self, method: str, path: str, headers: Headers = None, body: bytes = b"") -> Answer:
        return ask(self.port, method, path, headers, body)

    def refused(
        self, status: int, code: str, method: str, path: str, headers: Headers = None, body: bytes = b""
    ) -> Answer:
        """The answer, which names the code and no secret; the application never saw the request."""
        before = self.ran
        answer = self.ask(method, path, headers, body)
        assert (answer.status, self.ran) == (status, before), answer.body
        if method != "HEAD":
            shown = answer.json["error"]["freetoken_code"] if "error" in answer.json else answer.json["code"]
            assert shown == code
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert self.token.encode() not in answer.body and KEY.encode() not in answer.body
        return answer

    def passes(self, method: str, path: str, headers: Headers = None, body: bytes = b"") -> Answer:
        answer = self.ask(method, path, headers, body)
        assert answer.status == 200, answer.body
        assert self.ran[-1] == f"{method} {path.partition('?')[0]}"
        return answer

    def raw(self, request: bytes) -> bytes:
        """What comes back for these bytes, up to the end of the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@contextmanager
def door(home: Path, *arguments: str, environ: dict[str, str] | None = None) -> Iterator[Door]:
    """A daemon of its own. Its first real answer has come: the recorder is in place."""
    with running(home, "--port", "0", *arguments, environ={**(environ or {}), "FAKE_PLANTED": "recorder"}) as daemon:
        found = Door(daemon)
        assert json.loads(ask(daemon.port, "GET", RAN).body) == []
        yield found


__all__ = ["JSON", "KEY", "Door", "door"]
