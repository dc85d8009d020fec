"""A ModelHost with one model whose tokens are bytes, so that cuts between tokens fall inside characters."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from freetoken.api.host import LoadedModel, ModelListing
from freetoken.core.errors import ModelNotFound, ModelNotLoaded
from freetoken.core.ports import GenerationBackend
from freetoken.text.messages import prepare
from tests.fakes.backend import EOS


class ByteDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in token_ids if token < EOS))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteCodec:
    """Token ids 0 to 255 are bytes, 256 is the end of sequence, up to 299 are without text."""

    vocab_size = 300
    has_template = True
    special_ids = frozenset({EOS})

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    encode_chat = encode

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> ByteDetokenizer:
        return ByteDetokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    async def render(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        settings = "".join(f"[{name}={value}]" for name, value in kwargs.items())
        return settings + "".join(f"{turn['role']}: {turn['content']}\n" for turn in prepare(messages))

    def close(self) -> None:
        pass


class FakeHost:
    """Serves `model` at once, or after `loading_s`; `shelf` holds ids that are there and not loaded."""

    def __init__(self, backend: GenerationBackend, **facts: Any) -> None:
        tiny = {"id": "org/tiny", "text": ByteCodec(), "context_tokens": 4096, "eos_ids": (EOS,), "backend": backend}
        self.model = LoadedModel(**tiny | facts)
        self.shelf = ["org/other"]
        self.loading_s = 0.0

    async def resolve(self, model_id: str) -> LoadedModel:
        await asyncio.sleep(self.loading_s)
        if model_id == self.model.id:
            return self.model
        if model_id in self.shelf:
            raise ModelNotLoaded(f"{model_id} is not loaded.", fixes=[f"ft load {model_id}"])
        raise ModelNotFound(f"There is no model {model_id!r}; known: {self.model.id}.", param="model")

    def listing(self) -> list[ModelListing]:
        return [ModelListing(self.model.id, 1_700_000_000, True), *(ModelListing(id, 1, False) for id in self.shelf)]
