"""An ASGI application on a real socket in a thread, and raw requests to it, as a browser or an attacker sends them."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextmanager
def served(app: Any, sock: socket.socket | None = None, ws: str = "auto") -> Iterator[int]:
    """The port that `app` is served at."""
    sock = sock or socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_level="critical", ws=ws, proxy_headers=False)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.005)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


def ask(
    port: int, method: str, path: str, headers: list[tuple[str, str]] | dict[str, str] | None = None, body: bytes = b""
) -> Answer:
    """One request with exactly these headers; Host is ours unless given, and a length is said unless it is chunked."""
    given = list(headers.items()) if isinstance(headers, dict) else headers or []
    names = {name.lower() for name, _ in given}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    if "host" not in names:
        connection.putheader("host", f"127.0.0.1:{port}")
    for name, value in given:
        connection.putheader(name, value)
    if not {"transfer-encoding", "content-length"} & names:
        connection.putheader("content-length", str(len(body)))
    connection.endheaders()
    try:
        if body:
            connection.send(body)
    except (BrokenPipeError, ConnectionResetError):
        pass  # refused before the body was read: the answer is there all the same
    response = connection.getresponse()
    answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    connection.close()
    return answer
