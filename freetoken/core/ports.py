"""The protocols at the seams: who implements them is decided where the house is put together. Pure."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from freetoken.core.events import GenerationEvent
from freetoken.core.types import GenerateRequest


class GenerationBackend(Protocol):
    """Turns token ids into token ids. Implemented by wire.remote (the engine process) and engine.inproc (tests)."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Stream one generation: any Progress, then Tokens until one has `finish`, or a single Failed.

        Closing the generator early cancels the request and frees all it holds. Raises EngineDied (core.errors)
        when the engine goes away in the middle; never waits without a deadline.
        """
        ...


class Clock(Protocol):
    """Time, so that a test can turn it."""

    def monotonic(self) -> float: ...

    def time(self) -> float: ...
