"""What the data API needs of whoever owns the models: a port, implemented by the daemon (and by tests). Pure.

Does not know processes, loading or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from freetoken.core.ports import GenerationBackend
from freetoken.text.codec import TextCodec


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that answers now."""

    id: str
    backend: GenerationBackend
    text: TextCodec  # tokenizer and chat template
    context_tokens: int  # prompt + output may not exceed this: min(trained window, KV pool)
    eos_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)  # from generation_config.json


@dataclass(frozen=True, slots=True)
class ModelListing:
    """A row of GET /v1/models."""

    id: str
    created: int  # unix seconds: when its files were completed
    loaded: bool


class ModelHost(Protocol):
    async def resolve(self, model_id: str) -> LoadedModel:
        """The model that `model_id` names, ready. Waits (with a deadline) while it is loading.

        Raises ModelNotFound (with the known ids) or ModelNotLoaded (with how to load it).
        """
        ...

    def listing(self) -> list[ModelListing]: ...
