"""A GenerationBackend that plays a script: events, pauses and errors, in order. Counts how its generations end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from freetoken.core.events import GenerationEvent, Progress, Tokens
from freetoken.core.types import FinishReason, GenerateRequest, TokenLogprob

Step = GenerationEvent | float | Exception  # say it, sleep so many seconds, raise it
Script = Callable[[GenerateRequest], Sequence[Step]]
EOS = 256


class FakeBackend:
    """`script` is called once a request. `cancelled` counts generations that were closed before their end."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.running = 0
        self.most_running = 0
        self.cancelled = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        over = False
        try:
            yield Progress(0, len(request.token_ids))
            for step in self.script(request):
                if isinstance(step, Exception):
                    over = True
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                over = not isinstance(step, Tokens | Progress) or (isinstance(step, Tokens) and step.finish is not None)
                yield step
        finally:
            self.running -= 1
            self.cancelled += not over


def says(text: str, *, gap_s: float = 0.0, group: int = 1, cached: int | None = None) -> list[Step]:
    """The bytes of `text`, `group` at a time, then end of sequence."""
    ids = [*text.encode(), EOS]
    steps: list[Step] = []
    for at in range(0, len(ids), group):
        part = tuple(ids[at : at + group])
        finish = FinishReason.STOP if at + group >= len(ids) else None
        steps += [gap_s, Tokens(part, cached=cached if at == 0 else None, finish=finish)]
    return [step for step in steps if step != 0.0]


def scored(text: str, top: int) -> list[Step]:
    """`text` with made-up logprobs: token t has -t/256, and its alternatives t, t+1, ... follow."""
    steps: list[Step] = []
    for token in [*text.encode(), EOS]:
        best = tuple((token + i, -(token + i) / 256) for i in range(top))
        score = TokenLogprob(token, -token / 256, best)
        steps.append(Tokens((token,), (score,), finish=FinishReason.STOP if token == EOS else None))
    return steps


def limited(text: str, limited_by: str | None = None) -> list[Step]:
    """`text` and then no more room."""
    return [Tokens(tuple(text.encode()), finish=FinishReason.LENGTH, limited_by=limited_by)]
