"""Stop strings in a stream of text: everything before the first one, nothing of it. Pure.

Does not know tokens: it sees text that is certain (detokenize.py) and gives the same answer however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete, holding back what may still become one.

    The stop string whose last character comes first wins; of two that end together, the longer. Empty strings are
    ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._hit = False

    def push(self, text: str) -> tuple[str, bool]:
        """Add `text`; returns (text that may be shown, whether a stop string was found).

        After a hit nothing more is shown, whatever is pushed.
        """
        if self._hit:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._hit, self._held = True, ""
            return text[: min(found)[1]], True
        start = self._first_possible(text)
        self._held = text[start:]
        return text[:start], False

    def flush(self) -> str:
        """The text held back, once it is known that no more comes."""
        held, self._held = self._held, ""
        return held

    def _first_possible(self, text: str) -> int:
        """Where the longest end of `text` that begins a stop string starts; len(text) when there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
