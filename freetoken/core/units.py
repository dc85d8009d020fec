"""Bytes and durations: parse what people type, print what people read. Pure.

Does not know what the quantities mean; the names around them say so.
"""

from __future__ import annotations

import re

_BINARY = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


class Bytes(int):
    """A number of bytes. Arithmetic gives plain ints; wrap a result that crosses an interface."""

    __slots__ = ()

    def __str__(self) -> str:
        sign, size = ("-", -int(self)) if self < 0 else ("", int(self))
        for unit, step in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if size >= step:
                return f"{sign}{size / step:.2f} {unit}"
        return f"{sign}{size} B"

    @classmethod
    def parse(cls, text: str) -> Bytes:
        """`8GiB`, `512 MiB`, `1e9`-less plain bytes, `7GB` (decimal). Raises ValueError naming the accepted units."""
        number, unit = _split(text)
        factor = {**_BINARY, **_DECIMAL}.get(unit.lower())
        if factor is None:
            raise ValueError(f"{text!r} is not a size: use a number with B, KiB, MiB, GiB, KB, MB or GB")
        return cls(round(number * factor))


class Seconds(float):
    """A duration in seconds."""

    __slots__ = ()

    def __str__(self) -> str:
        if self < 1:
            return f"{self * 1000:.0f} ms"
        return f"{float(self):.1f} s" if self < 120 else f"{self / 60:.1f} min"

    @classmethod
    def parse(cls, text: str) -> Seconds:
        """`90`, `90s`, `250ms`, `2min`, `1h`. Raises ValueError naming the accepted units."""
        number, unit = _split(text)
        factor = _SECONDS.get(unit.lower())
        if factor is None:
            raise ValueError(f"{text!r} is not a duration: use a number with ms, s, min or h")
        return cls(number * factor)


def _split(text: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return float(match[1]), match[2]
