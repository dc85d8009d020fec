"""A control server that says what a test tells it to: the documented shapes over a real loopback socket."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

TOKEN = "t" * 64
INSTANCE = "instance-1"
Json = dict[str, Any]


@dataclass
class Control:
    """The server's script and what it saw. A test changes the fields before it calls."""

    url: str = ""
    live: Json = field(default_factory=lambda: {"service": "freetoken", "api_version": "1"})
    engine: Json = field(default_factory=lambda: {"state": "ready", "model": "demo"})
    load_status: int = 202
    load_answer: Json = field(default_factory=lambda: {"id": "op1", "kind": "load", "state": "running"})
    operation: Json = field(default_factory=lambda: {"id": "op1", "kind": "load", "state": "running"})
    events: list[Json | None] = field(default_factory=list)  # None: the connection breaks here, once
    chat_status: int = 200
    chat: list[Any] = field(
        default_factory=list
    )  # records, "[DONE]", a float (a pause), or None (the connection breaks)
    seen: list[tuple[str, str, Any]] = field(default_factory=list)
    after: list[str | None] = field(default_factory=list)  # Last-Event-ID of each /events
    keys: list[str | None] = field(default_factory=list)  # Authorization of each chat request
    cancelled: list[str] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)

    def say(self, *texts: str, usage: Json | None = None) -> None:
        """Script one good answer."""
        chunks: list[Any] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"content": text}}]} for text in texts]
        chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        self.chat = [*chunks, {"choices": [], "usage": usage or {"prompt_tokens": 5, "completion_tokens": 2}}, "[DONE]"]


@contextmanager
def control_server(home: Path, **script: Any) -> Iterator[Control]:
    """Serve a Control for the state folder `home`, whose record names this process."""
    control = Control(**script)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(control))
    server.daemon_threads = True
    control.url = f"http://127.0.0.1:{server.server_address[1]}"
    write_record(home, control.url)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield control
    finally:
        server.shutdown()
        server.server_close()


def write_record(home: Path, url: str, **changes: Any) -> None:
    """runtime/daemon.json and token of a state folder, as a daemon that is this process would leave them."""
    (home / "runtime").mkdir(parents=True, exist_ok=True)
    (home / "freetoken-home.json").write_text('{"layout": 1}')
    (home / "token").write_text(TOKEN + "\n")
    me = psutil.Process(os.getpid())
    record = {"url": url, "pid": me.pid, "start_time": me.create_time(), "instance_id": INSTANCE, "version": "0.1.0"}
    (home / "runtime" / "daemon.json").write_text(json.dumps({**record, **changes}))


def problem(code: str, detail: str, *fixes: str) -> Json:
    """Problem+json as the daemon writes it."""
    return {
        "code": code,
        "title": "",
        "detail": detail,
        "numbers": {},
        "fixes": [{"id": "x", "title": f} for f in fixes],
    }


def _handler(control: Control) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_GET(self) -> None:
            control.seen.append(("GET", self.path, dict(self.headers)))
            if self.path == "/api/v1/live":
                self.answer(200, control.live)
            elif not self.authorised():
                self.answer(401, problem("UNAUTHORIZED", "a valid token is needed"))
            elif self.path == "/api/v1/engine":
                self.answer(200, control.engine)
            elif self.path == "/api/v1/events":
                self.stream_events()
            else:
                self.answer(200, control.operation)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            control.seen.append(("POST", self.path, body))
            if self.path == "/v1/chat/completions":
                control.keys.append(self.headers.get("authorization"))
                self.stream_chat()
            elif not self.authorised():
                self.answer(401, problem("UNAUTHORIZED", "a valid token is needed"))
            elif self.path == "/api/v1/engine/load":
                self.answer(control.load_status, control.load_answer)
            elif self.path.endswith("/cancel"):
                control.cancelled.append(self.path.split("/")[-2])
                self.answer(202, control.operation)
            else:
                self.answer(202, control.operation)

        def authorised(self) -> bool:
            return self.headers.get("authorization") == f"Bearer {TOKEN}"

        def answer(self, status: int, value: Json) -> None:
            content = json.dumps(value).encode()
            kind = "application/problem+json" if status >= 400 else "application/json"
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def start_stream(self) -> None:
            self.close_connection = True
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()

        def stream_events(self) -> None:
            after = self.headers.get("last-event-id")
            control.after.append(after)
            self.start_stream()
            for seq, event in enumerate(control.events, 1):
                if after is not None and seq <= int(after):
                    continue
                if event is None:
                    control.events.remove(None)
                    return
                number = "" if event["type"] == "stream.hello" else f"id: {seq}\n"
                self.wfile.write(f": note\n{number}data: {json.dumps(event)}\n\n".encode())
            self.wait_for_hang_up()

        def stream_chat(self) -> None:
            if control.chat_status != 200:
                self.answer(control.chat_status, control.chat[0])
                return
            self.start_stream()
            self.wfile.write(b": waiting\n\n")
            for record in control.chat:
                if record is None:
                    return
                if isinstance(record, float):
                    time.sleep(record)
                    continue
                text = record if isinstance(record, str) else json.dumps(record)
                self.wfile.write(f"data: {text}\n\n".encode())
                self.wfile.flush()
            if control.chat[-1] != "[DONE]":
                self.wait_for_hang_up()

        def wait_for_hang_up(self) -> None:
            self.wfile.flush()
            self.connection.settimeout(20)
            try:
                if not self.connection.recv(1):
                    control.hung_up.set()
            except OSError:
                control.hung_up.set()

    return Handler
