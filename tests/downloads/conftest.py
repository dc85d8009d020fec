"""A fake hub with one model, org/m."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.downloads.bench import Transfer, repository
from tests.fakes.hub import FakeHub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub({"org/m": repository()}) as running:
        yield running


@pytest.fixture
def transfer(hub: FakeHub, tmp_path: Path) -> Transfer:
    return Transfer(hub, tmp_path / "dl")
