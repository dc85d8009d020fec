"""Cut one request's next piece of work. Pure.

Does not know other requests or pages beyond the table it copies.
"""

from __future__ import annotations

from freetoken.core.types import SamplingParams
from freetoken.engine.step import Request, Work


def remaining(request: Request) -> int:
    """Tokens whose KV is not computed yet; never 0 for one that runs. At 1 the next step gives the next token."""
    return len(request.token_ids) - request.computed


def next_work(request: Request, most: int) -> Work:
    """The next tokens to compute, at most `most`; the last of them is sampled from where it ends the sequence."""
    end = min(len(request.token_ids), request.computed + most)
    return Work(
        request_id=request.id,
        token_ids=tuple(request.token_ids[request.computed : end]),
        start=request.computed,
        pages=tuple(request.pages),
        sample=end == len(request.token_ids),
        sampling=request.sampling,
        history=tuple(request.token_ids) if _penalised(request.sampling) else (),
        prompt_len=request.prompt_len,
    )


def _penalised(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)
