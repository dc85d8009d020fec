"""What a model family is to the catalogue: the names it goes by and one reader. Pure.

Does not know which families there are (families/table.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from freetoken.catalog.hf import Config
from freetoken.catalog.names import NameMap
from freetoken.catalog.spec import ModelSpec

Reader = Callable[[Config], tuple[ModelSpec, NameMap]]


@dataclass(frozen=True, slots=True)
class Family:
    """A reader turns a configuration into the model and the map from its file's names to canonical ones."""

    name: str  # config.json's model_type
    architectures: tuple[str, ...]  # config.json's architectures that are this model with a language-model head
    read: Reader
