"""From a question in text to an answer in text: the only place where a stream is assembled.

    resolve the model → chat template → token ids → length check → backend → text → stop strings → updates

Does not know HTTP, SSE or any API's field names: a format (openai_chat.py, ...) makes an Ask and spells the updates.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from freetoken.api.assembly import Assembler, Delta, Done
from freetoken.api.host import LoadedModel, ModelHost
from freetoken.core.errors import ContextLengthExceeded, EngineError, UsageError, from_code
from freetoken.core.events import Failed, GenerationEvent, Progress, Tokens
from freetoken.core.types import FinishReason, GenerateRequest, SamplingParams

T = TypeVar("T")

_DEFAULTS = frozenset({"temperature", "top_k", "top_p", "min_p", "repetition_penalty"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the chat template, and the caller's variables for it."""

    messages: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request for one answer."""

    id: str
    model: str
    prompt: Conversation | str | tuple[int, ...]
    sampling: Mapping[str, Any]  # fields of SamplingParams that the caller set; the model's defaults fill the rest
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds. An error within `patience_s` is an HTTP status; after it the stream has begun."""

    patience_s: float = 1.0  # how long the first update may take before a Waiting is said
    comment_s: float = 10.0  # between one Waiting and the next
    stalled_client_s: float = 300.0  # how long a client may leave what it was sent unread


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing yet: the model loads, or the request is queued or in prefill."""


Update = Waiting | Delta | Done


async def answer(host: ModelHost, ask: Ask, limits: Limits) -> AsyncGenerator[Update, None]:
    """Any Waiting, then Deltas, then one Done. Raises what went wrong as a FreeTokenError.

    Prompts that are too long are refused before anything is yielded, unless the model was still loading. Closing the
    generator at any point cancels what it was waiting for, once.
    """
    pause = limits.patience_s
    async with _started(host.resolve(ask.model)) as resolving:
        while not await _settled(resolving, pause):
            yield Waiting()
            pause = limits.comment_s
        model = resolving.result()
    prompt_ids = await _prompt_ids(model, ask)
    request = _request(model, ask, prompt_ids)
    continues = not isinstance(ask.prompt, Conversation)
    assembler = Assembler(model.text, prompt_ids, ask.stop, continues=continues)
    async with aclosing(model.backend.generate(request)) as events:
        async with _started(_next_tokens(events)) as arriving:
            while not await _settled(arriving, pause):
                yield Waiting()
                pause = limits.comment_s
            tokens = arriving.result()
        while True:
            if delta := assembler.push(tokens):
                yield delta
            if assembler.done:
                break
            tokens = await _next_tokens(events)
    yield _honest(assembler.done)


async def _next_tokens(events: AsyncGenerator[GenerationEvent, None]) -> Tokens:
    """The next event that carries tokens."""
    async for event in events:
        match event:
            case Tokens():
                return event
            case Failed(code, detail, numbers):
                raise from_code(code, detail, numbers)
            case Progress():
                pass
    raise EngineError("The engine ended the answer without saying why.")


def _honest(done: Done) -> Done:
    """`done`, unless the engine gave up on the answer: no API has a finish reason for that."""
    if done.finish is FinishReason.CANCELLED:
        tokens = done.usage.completion_tokens
        raise EngineError(f"The engine cancelled the answer after {tokens} tokens.", numbers={"tokens": tokens})
    return done


# ── before the engine ───────────────────────────────────────────────────────────────────────────────────────────────
async def _prompt_ids(model: LoadedModel, ask: Ask) -> tuple[int, ...]:
    prompt = ask.prompt
    if isinstance(prompt, tuple):
        return prompt
    encode: Callable[[str], list[int]] = model.text.encode
    if isinstance(prompt, Conversation):
        prompt = await model.text.render(prompt.messages, **prompt.template_kwargs)
        encode = model.text.encode_chat
    # never on the event loop: a codec takes its callers in turn, and a long prompt takes a second
    return tuple(await asyncio.to_thread(encode, prompt))


def _request(model: LoadedModel, ask: Ask, prompt_ids: tuple[int, ...]) -> GenerateRequest:
    """Checked against the model. Raises UsageError, ContextLengthExceeded."""
    defaults = {name: value for name, value in model.sampling_defaults.items() if name in _DEFAULTS}
    sampling = SamplingParams(**{**defaults, **ask.sampling})
    vocabulary = model.text.vocab_size
    if not prompt_ids:
        raise UsageError("The prompt is empty: there is nothing to go on from.", param="prompt")
    _check_ids("prompt", max(prompt_ids), vocabulary)
    _check_ids("logit_bias", max((token for token, _ in sampling.logit_bias), default=0), vocabulary)
    limit = model.context_tokens
    if len(prompt_ids) >= limit:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt_ids)} tokens; {model.id} takes {limit - 1} and at least 1 for the answer.",
            numbers={"prompt_tokens": len(prompt_ids), "context_tokens": limit},
            param="messages" if isinstance(ask.prompt, Conversation) else "prompt",
        )
    return GenerateRequest(ask.id, prompt_ids, sampling, model.eos_ids)


def _check_ids(param: str, largest: int, vocabulary: int) -> None:
    if largest >= vocabulary:
        raise UsageError(
            f"`{param}` has the token id {largest}; the model has {vocabulary} tokens, 0 to {vocabulary - 1}.",
            numbers={"token_id": largest, "vocab_size": vocabulary},
            param=param,
        )


# ── waiting ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@asynccontextmanager
async def _started(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """`work` as a task that does not outlive the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()  # nothing, when it is done
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen here: nobody may be left to ask for it


async def _settled(task: asyncio.Task[Any], timeout_s: float) -> bool:
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    return bool(done)
