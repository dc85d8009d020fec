"""Asks a child process for one JSON document and gives up at a deadline: what may hang or crash is asked so.

A driver that is stuck takes whoever calls it along, and no signal frees a process inside the kernel: such a child is
killed, waited for briefly and then left behind. Does not know what is asked.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from freetoken.daemon import native
from freetoken.settings.load import child_environment

LIMIT = 1 << 20  # bytes of an answer
REAP_S = 0.5  # from the kill to the exit code


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Nobody knows: the child was too slow, crashed, or said something that is no answer."""

    reason: str


def ask(command: Sequence[str], deadline_s: float) -> dict[str, Any] | NoAnswer:
    """The JSON object that `command` (absolute program, no shell) prints on stdout within `deadline_s`."""
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
            **native.own_group(),
        )
    except OSError as error:
        return NoAnswer(f"the program could not be started: {error.strerror}")
    try:
        return _converse(child, time.monotonic() + deadline_s, deadline_s)
    finally:
        _end(child)


def _converse(child: subprocess.Popen[bytes], until: float, deadline_s: float) -> dict[str, Any] | NoAnswer:
    answer, words = _Reading(child.stdout), _Reading(child.stderr)
    content = answer.wait(until)
    if content is not None and len(content) > LIMIT:
        return NoAnswer(f"it wrote more than {LIMIT >> 20} MiB")
    try:
        code = child.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return NoAnswer(f"no answer within {deadline_s:g} s")
    if code != 0:
        signal = native.signal_name(code)
        return NoAnswer(f"it crashed ({signal or f'exit code {code}'}){_last_line(words.wait(until))}")
    try:
        document = json.loads(content or b"")
    except ValueError:
        return NoAnswer("its answer is not JSON")
    return document if isinstance(document, dict) else NoAnswer("its answer is not an object")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Away with it and what it started, if it still runs."""
    if child.poll() is None:
        native.end_group(child.pid, force=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(REAP_S)


class _Reading:
    """A stream read to its end, or to one byte past LIMIT, by a thread that nobody has to wait for."""

    def __init__(self, stream: IO[bytes] | None) -> None:
        self._content: bytes | None = None
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        if self._stream is not None:
            with self._stream:
                self._content = self._stream.read(LIMIT + 1)

    def wait(self, until: float) -> bytes | None:
        """The content; None where it has not ended at `until`."""
        self._thread.join(max(0.0, until - time.monotonic()))
        return self._content


def _last_line(words: bytes | None) -> str:
    lines = [line.strip() for line in (words or b"").decode("utf-8", "replace").splitlines() if line.strip()]
    return f": {lines[-1][:300]}" if lines else ""
