"""The error tree: codes are unique, and an error survives the trip through the wire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from freetoken.core import errors
from freetoken.core.errors import FreeTokenError


def tree(root: type[FreeTokenError] = FreeTokenError) -> Iterator[type[FreeTokenError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


def test_every_class_has_a_code_and_a_title_of_its_own() -> None:
    classes = list(tree())
    codes = [c.code for c in classes]
    assert len(set(codes)) == len(codes)
    assert all(c.code == c.code.upper() and c.title for c in classes)
    assert errors.leaves().keys() == set(codes)


@pytest.mark.parametrize("cls", list(tree()), ids=lambda c: c.code)
def test_an_error_is_rebuilt_from_its_code(cls: type[FreeTokenError]) -> None:
    rebuilt = errors.from_code(cls.code, "needs 3 pages", {"pages": 3})
    assert type(rebuilt) is cls
    assert (rebuilt.detail, rebuilt.numbers) == ("needs 3 pages", {"pages": 3})


def test_an_unknown_code_is_an_engine_error() -> None:
    assert type(errors.from_code("FROM_THE_FUTURE", "?")) is errors.EngineError
