"""Chat templates, rendered in a child process with limits on time, output and memory: none can hang the daemon.

The child (template_child.py) is kept and used again; a render that passes its deadline is ended by killing it, and the
next one starts another. Renders take turns on one thread. Does not know tokenizers, nor what messages should look like
(messages.py).
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.core.errors import FreeTokenError, ModelNotLoaded, QueueTimeout, TemplateError

CHILD = Path(__file__).with_name("template_child.py")
MIB = 1 << 20
JSON_GROWTH = 6  # bytes of JSON for one byte of UTF-8 at most: \u0000
NO_WINDOW: int = getattr(subprocess, "CREATE_NO_WINDOW", 0)  # Windows: no console flashes up


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    render_s: float = 2.0
    start_s: float = 10.0  # a new child's first answer
    wait_s: float = 15.0  # from the question to its answer: earlier renders and a new child's start included
    output_bytes: int = 8 * MIB
    memory_bytes: int = 512 * MIB


class ChildEnded(Exception):
    """The child gave no whole answer. `expired`: because its time was over."""

    def __init__(self, expired: bool, status: int | None) -> None:
        super().__init__(f"expired {expired}, status {status}")
        self.expired, self.status = expired, status


class TemplateSandbox:
    """Owns the child process. One for each loaded model; `close` ends it."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._turns = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._lock = threading.Lock()  # over _child and _closed
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def check(self, source: str) -> None:
        """Compile `source` only; raises TemplateError. Blocking, bounded by the limits: for a loading thread."""
        self._submit(source, None).result()

    async def render(self, source: str, values: Mapping[str, Any]) -> str:
        """The text of template `source` with `values`, which must be JSON.

        Raises TemplateError when the template raises or passes a limit, QueueTimeout when others took all the time.
        """
        turn = asyncio.wrap_future(self._submit(source, dict(values)))
        wait_s = self._limits.wait_s
        try:
            return await asyncio.wait_for(turn, wait_s)
        except TimeoutError:
            raise QueueTimeout(
                f"Earlier chats kept the chat template busy for {wait_s:g} s.", numbers={"waited_s": wait_s}
            ) from None

    def close(self) -> None:
        """End the child; renders under way or waiting fail at once. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            child = self._child
        if child is not None:
            child.kill()
            self._turns.submit(_end, child)  # on the thread that may be reading from it
        self._turns.shutdown(wait=False)

    def _submit(self, source: str, values: Mapping[str, Any] | None) -> Future[str]:
        with self._lock:  # so that nothing is submitted after shutdown
            if self._closed:
                raise _unloaded()
            return self._turns.submit(self._answer, source, values)

    def _answer(self, source: str, values: Mapping[str, Any] | None) -> str:
        """Runs on the thread of turns."""
        try:
            reply = self._exchange(self._ready_child(), source, values, self._limits.render_s)
        except ChildEnded as ended:
            raise self._limit_error(ended) from None
        match reply:
            case {"text": str(text)}:
                return text
            case {"fault": "template", "detail": detail}:
                raise TemplateError(str(detail), fixes=("Change the messages to what this model's template takes.",))
            case {"fault": "output"}:
                size = self._limits.output_bytes
                raise TemplateError(
                    f"The chat template wrote more than {size} bytes; that is the limit on its output.",
                    numbers={"output_bytes": size},
                )
        size = self._limits.memory_bytes
        raise TemplateError(
            f"The chat template needed more than the {size // MIB} MiB of memory that it may use.",
            numbers={"memory_bytes": size},
        )

    def _limit_error(self, ended: ChildEnded) -> FreeTokenError:
        seconds = self._limits.render_s
        if ended.expired:
            return TemplateError(
                f"The chat template did not finish within {seconds:g} s; that is the limit on its time.",
                numbers={"render_s": seconds},
            )
        if self._closed:
            return _unloaded()
        return TemplateError(f"The process that ran the chat template ended with status {ended.status}.")

    def _ready_child(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._child is not None and self._child.poll() is None:
                return self._child
            if self._closed:
                raise _unloaded()
            child = self._child = self._spawn()
        try:
            self._exchange(child, "", None, self._limits.start_s)
        except ChildEnded as ended:
            reason = f"did not answer in {self._limits.start_s:g} s" if ended.expired else f"ended: {ended.status}"
            raise FreeTokenError(f"The process that renders chat templates did not start: it {reason}.") from ended
        return child

    def _spawn(self) -> subprocess.Popen[bytes]:
        # -P keeps the child's own folder off its import path; by file, so that it starts wherever the daemon runs
        command = [sys.executable, "-P", str(CHILD), str(self._limits.memory_bytes)]
        try:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, creationflags=NO_WINDOW, close_fds=True
            )
        except OSError as error:
            raise FreeTokenError(f"The process that renders chat templates did not start: {error}.") from error

    def _exchange(
        self, child: subprocess.Popen[bytes], source: str, values: Mapping[str, Any] | None, seconds: float
    ) -> dict[str, Any]:
        """One question and its answer. The deadline kills the child, which ends a read or a write that hangs."""
        request = {"template": source, "values": values, "output_bytes": self._limits.output_bytes, "seconds": seconds}
        most = JSON_GROWTH * self._limits.output_bytes + MIB
        expired = threading.Event()
        timer = threading.Timer(seconds, _expire, (child, expired))
        timer.start()
        try:
            line = _ask(child, json.dumps(request).encode() + b"\n", most)
        finally:
            timer.cancel()
            timer.join()
        if expired.is_set() or not line.endswith(b"\n"):
            raise ChildEnded(expired.is_set(), _end(child))
        reply: dict[str, Any] = json.loads(line)
        return reply


def _unloaded() -> ModelNotLoaded:
    return ModelNotLoaded("The model was unloaded.", fixes=("Load it again: ft load.",))


def _ask(child: subprocess.Popen[bytes], request: bytes, most: int) -> bytes:
    """The child's answer line, at most `most` bytes of it; b"" when it is gone."""
    if child.stdin is None or child.stdout is None:
        raise ValueError("the child was started without pipes")
    try:
        child.stdin.write(request)
        child.stdin.flush()
    except OSError:  # a broken pipe: the child died, and the caller says so
        return b""
    return child.stdout.readline(most)


def _expire(child: subprocess.Popen[bytes], expired: threading.Event) -> None:
    expired.set()
    child.kill()


def _end(child: subprocess.Popen[bytes]) -> int:
    """Kill, reap and close; returns the exit status."""
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # unsent bytes of a write that the kill cut short
                continue
    return child.wait(timeout=10)
