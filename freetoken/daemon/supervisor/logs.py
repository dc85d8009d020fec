"""What the engine process prints: the last lines in memory, all of them in a file of bounded size.

Lines are made harmless before anybody sees them: control characters are escaped (a log is read in terminals), the
home folder becomes `~`, and length is bounded. Does not know what the lines mean.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

KEPT = 500  # lines
LINE = 2000  # characters
FILE = 4 << 20  # bytes; one older file of this size is kept beside it


class EngineLog:
    """Appends to `path` and remembers the newest lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: deque[str] = deque(maxlen=KEPT)
        self._file = path.open("a", encoding="utf-8")

    def add(self, raw: bytes | str) -> str:
        """The line as kept."""
        text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
        line = clean(text.rstrip("\r\n"))
        self._lines.append(line)
        if self._file.tell() > FILE:
            self._rotate()
        self._file.write(line + "\n")
        self._file.flush()
        return line

    def last(self, count: int) -> list[str]:
        """The newest `count` lines, oldest first."""
        return list(self._lines)[-count:]

    def clear(self) -> None:
        """Forget the lines in memory: another process begins."""
        self._lines.clear()

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_suffix(".1.log"))
        self._file = self._path.open("a", encoding="utf-8")


def clean(line: str) -> str:
    """`line` without control characters, without the name of the user's home folder, and not endless."""
    shown = "".join(char if char.isprintable() or char == "\t" else f"\\x{ord(char):02x}" for char in line[:LINE])
    home = str(Path.home())
    return shown.replace(home, "~") if len(home) > 1 else shown
