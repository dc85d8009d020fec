"""The wire's twins of the core vocabulary, both ways. Pure.

core.events and core.types say what happens; wire.messages say it with a request id. Does not know sockets.
"""

from __future__ import annotations

from freetoken.core import events
from freetoken.core.errors import FreeTokenError
from freetoken.core.types import GenerateRequest
from freetoken.wire.messages import Failed, Progress, Submit, Tokens


def submit(request: GenerateRequest) -> Submit:
    return Submit(
        id=request.id,
        token_ids=request.token_ids,
        sampling=request.sampling,
        eos_ids=request.eos_ids,
        deadline_ms=request.deadline_ms,
    )


def request(message: Submit) -> GenerateRequest:
    return GenerateRequest(message.id, message.token_ids, message.sampling, message.eos_ids, message.deadline_ms)


def message(request_id: str, event: events.GenerationEvent) -> Tokens | Progress | Failed:
    match event:
        case events.Progress():
            return Progress(id=request_id, done=event.done, total=event.total)
        case events.Failed():
            return Failed(id=request_id, code=event.code, detail=event.detail, numbers=dict(event.numbers))
        case events.Tokens():
            return Tokens(
                id=request_id,
                token_ids=event.token_ids,
                logprobs=event.logprobs,
                cached=event.cached,
                finish=event.finish,
                limited_by=event.limited_by,
            )


def event(said: Tokens | Progress | Failed) -> events.GenerationEvent:
    match said:
        case Progress():
            return events.Progress(said.done, said.total)
        case Failed():
            return events.Failed(said.code, said.detail, said.numbers)
        case Tokens():
            return events.Tokens(said.token_ids, said.logprobs, said.cached, said.finish, said.limited_by)


def failed(error: FreeTokenError, request_id: str | None = None) -> Failed:
    """`error` on the wire: of one request, or of the load (`request_id` None)."""
    return Failed(id=request_id, code=error.code, detail=error.detail, numbers=error.numbers)
