"""Tiny checkpoints, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.fakes import checkpoint as fake

Make = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """family -> its Hugging Face folder. Not to be written into."""
    root = tmp_path_factory.mktemp("hf")
    return cache(lambda family: fake.tiny(family, root / family, sharded=family == "mixtral"))


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """family -> its GGUF file, F32. Not to be written into."""
    root = tmp_path_factory.mktemp("gguf")
    return cache(lambda family: fake.tiny_gguf(family, root / f"{family}.gguf", tokenizer=family == "llama"))
