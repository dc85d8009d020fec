"""Cut one request's next piece of work. Pure.

Does not know other requests or pages beyond the tables it copies.
"""

from __future__ import annotations

from freetoken.core.types import SamplingParams
from freetoken.engine.paging.rules import Layout
from freetoken.engine.step import Request, StateWork, Work


def remaining(request: Request) -> int:
    """Tokens whose KV is not computed yet; never 0 for one that runs. At 1 the next step gives the next token."""
    return len(request.token_ids) - request.computed


def piece(request: Request, most: int, layout: Layout) -> int:
    """How many tokens to compute next, at most `most`.

    A recurrent state can be saved for others only at the end of a step, and used by them only where a page ends: then
    a piece ends with a page where it can, and the last tokens, whose logits are wanted, are a piece of their own.
    """
    end = min(len(request.token_ids), request.computed + most)
    if layout.recurrent:
        boundary = (layout.hit(end) if end == len(request.token_ids) else layout.whole(end)) * layout.page_size
        end = boundary if boundary > request.computed else end
    return end - request.computed


def next_work(request: Request, count: int) -> Work:
    """The next `count` tokens to compute; the last of them is sampled from where it ends the sequence."""
    end = request.computed + count
    return Work(
        request_id=request.id,
        token_ids=tuple(request.token_ids[request.computed : end]),
        start=request.computed,
        pages=tuple(request.pages),
        sample=end == len(request.token_ids),
        sampling=request.sampling,
        history=tuple(request.token_ids) if _penalised(request.sampling) else (),
        prompt_len=request.prompt_len,
        window=tuple(request.window),
        slid=request.slid,
        state=None if request.state is None else StateWork(request.state, request.source, request.saving),
    )


def _penalised(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)
