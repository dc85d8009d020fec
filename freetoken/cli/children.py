"""Runs a child process that takes a while: its lines as they come, a deadline that progress resets, its last words.

Does not know what the child does.
"""

from __future__ import annotations

import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import IO

TAIL_BYTES = 4_000  # of stderr, kept for the error
POLL_S = 0.2


class ChildFailed(Exception):
    """The child ended badly, or was ended because it stood still. `said` is the end of its stderr."""

    def __init__(self, reason: str, said: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.said = said

    def __str__(self) -> str:
        last = self.said.strip().splitlines()[-1:]
        return ": ".join([self.reason, *(line.removeprefix("error: ").removeprefix("ERROR: ") for line in last)])


def run_child(
    argv: Sequence[str],
    *,
    on_line: Callable[[str], None] = lambda line: None,
    mark: Callable[[], int] = lambda: 0,
    stall_s: float,
) -> None:
    """Run `argv` to its end. `on_line` gets each line of its stdout.

    A line, or another value of `mark` (asked every POLL_S), is progress; without any for `stall_s` seconds the child is
    ended. Raises ChildFailed. The child never outlives this call.
    """
    with tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr)
        try:
            _watch(_lines_of(child), on_line, mark, stall_s)
        except TimeoutError:
            raise ChildFailed(f"no progress for {stall_s:.0f} s", _tail(stderr)) from None
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
        if child.returncode != 0:
            raise ChildFailed(f"exit code {child.returncode}", _tail(stderr))


def _watch(
    lines: queue.Queue[str | None], on_line: Callable[[str], None], mark: Callable[[], int], stall_s: float
) -> None:
    """Until the child closes its stdout. TimeoutError when nothing moves."""
    seen, moved = mark(), time.monotonic()
    while True:
        try:
            line = lines.get(timeout=POLL_S)
        except queue.Empty:
            now = mark()
            if now != seen:
                seen, moved = now, time.monotonic()
            elif time.monotonic() - moved > stall_s:
                raise TimeoutError from None
            continue
        if line is None:
            return
        moved = time.monotonic()
        on_line(line)


def _lines_of(child: subprocess.Popen[bytes]) -> queue.Queue[str | None]:
    """The lines of the child's stdout, read by a thread of their own; None after the last."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with child.stdout or nullcontext(()) as stdout:
            for line in stdout:
                lines.put(line.decode("utf-8", "replace").strip())
        child.wait()
        lines.put(None)

    threading.Thread(target=read, name="child-stdout", daemon=True).start()
    return lines


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, 2)
    file.seek(max(0, size - TAIL_BYTES))
    return file.read().decode("utf-8", "replace")
