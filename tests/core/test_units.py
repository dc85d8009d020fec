"""Sizes and durations survive a round trip and refuse what they cannot read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.core.units import Bytes, Seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("512 MiB", 512 << 20), ("7GB", 7 * 10**9), ("123", 123), ("1.5KiB", 1536), ("2g", 2 << 30)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert Bytes.parse(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 parsecs", "-1GiB", "1e9B", "8GiBB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        Bytes.parse(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_printed_size_reads_back_within_its_two_digits(size: int) -> None:
    assert abs(Bytes.parse(str(Bytes(size))) - size) <= max(1, size // 190)


def test_negative_sizes_print_with_their_sign() -> None:
    assert str(Bytes(-965_292_852)) == "-920.58 MiB"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("250ms", 0.25), ("2min", 120), ("1h", 3600), ("3 s", 3)])
def test_durations_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert Seconds.parse(text) == seconds
