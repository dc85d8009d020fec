"""A daemon process of one state folder, started as people start it, with tests.fakes.daemon's engine; what it says."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from freetoken.daemon import discovery, store
from tests.fakes.serving import Answer, ask

PROGRAM = Path(__file__).with_name("daemon.py")
JSON = {"content-type": "application/json"}


class Daemon:
    """A daemon process of one home."""

    def __init__(self, home: Path, *arguments: str, environ: dict[str, str] | None = None) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "FREETOKEN_HOME": str(home), "PYTHONPATH": str(PROGRAM.parents[2]), **(environ or {})},
            text=True,
        )

    def wait_listening(self) -> discovery.Record:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            record = discovery.running(store.Home(self.home))
            if record is not None and record.pid == self.process.pid:
                self.port = int(record.url.rpartition(":")[2])
                return record
            assert self.process.poll() is None, self.stderr.read()
            time.sleep(0.02)
        raise AssertionError("the daemon did not come")

    @property
    def stderr(self) -> IO[str]:
        assert self.process.stderr is not None
        return self.process.stderr

    @property
    def token(self) -> dict[str, str]:
        return {"authorization": f"Bearer {(self.home / 'token').read_text().strip()}"}

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        sent = {**self.token, **{name.replace("_", "-"): value for name, value in headers.items()}}
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return ask(self.port, method, path, {**sent, **JSON} if content else sent, content)

    def load(self, model: Path | str, **options: object) -> Any:
        body = {"model": str(model), "options": options}
        return self.ask("POST", "/api/v1/engine/load", body, prefer="wait=20").json

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(20)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


@contextmanager
def running(home: Path, *arguments: str, environ: dict[str, str] | None = None) -> Iterator[Daemon]:
    daemon = Daemon(home, *arguments, environ=environ)
    try:
        daemon.wait_listening()
        yield daemon
    finally:
        daemon.end()


@contextmanager
def event_stream(daemon: Daemon, query: str = "", **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """The events as they come, each with the `id` line of its record."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=10)
    connection.request("GET", f"/api/v1/events{query}", headers={**daemon.token, **headers})
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")

    def events() -> Iterator[dict[str, Any]]:
        last_id = None
        for raw in response:
            line = raw.decode().rstrip("\n")
            if line.startswith("id: "):
                last_id = line[4:]
            elif line.startswith("data: "):
                yield {**json.loads(line[6:]), "id": last_id}
                last_id = None

    try:
        yield events()
    finally:
        response.close()  # it holds the socket, too
        connection.close()
