"""POST /v1/chat/completions: the body to an Ask, the answer to OpenAI's chunks and objects. Pure.

Facts: the OpenAI API reference, "Chat Completions". Does not know how an answer is made or sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freetoken.api import sse
from freetoken.api.assembly import Choice, Delta, Done, Scored
from freetoken.api.fields import CHAT, read_body
from freetoken.api.openai_common import Head, check_stream_options, logprob, sampling, usage
from freetoken.api.pipeline import Ask, Conversation
from freetoken.core.errors import UsageError


def parse(body: bytes, request_id: str) -> tuple[Ask, ChatWriter, bool]:
    """(what is asked, how to spell the answer, whether to stream). Raises UsageError and its kin."""
    values = read_body(body, CHAT, required=("model", "messages"))
    check_stream_options(values)
    head = Head(f"chatcmpl-{request_id}", values["model"])
    ask = Ask(
        id=head.id,
        model=head.model,
        prompt=Conversation(values["messages"], values.get("chat_template_kwargs", {})),
        sampling=sampling(values, logprobs=_logprobs(values), max_tokens=_max_tokens(values)),
        stop=values.get("stop", ()),
    )
    return ask, ChatWriter(head, values.get("stream_options", False)), values.get("stream", False)


def _logprobs(values: Mapping[str, Any]) -> int | None:
    wanted, top = values.get("logprobs", False), values.get("top_logprobs", 0)
    if top and not wanted:
        raise UsageError("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    return top if wanted else None


def _max_tokens(values: Mapping[str, Any]) -> int | None:
    """The smaller of the old name and the new one: neither promise is broken."""
    return min((values[name] for name in ("max_tokens", "max_completion_tokens") if name in values), default=None)


class ChatWriter:
    """One chat completion (reply.Writer)."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._head = head
        # with include_usage every chunk has the field, and one more chunk without choices fills it
        self._chunk: dict[str, Any] = head.object("chat.completion.chunk") | ({"usage": None} if include_usage else {})
        self._include_usage = include_usage

    def start(self) -> bytes:
        return self._event({"role": "assistant", "content": "", "refusal": None})

    def delta(self, delta: Delta) -> bytes:
        return self._event({"content": delta.text}, scores=delta.scores)

    def end(self, done: Done) -> bytes:
        last = self._event({}, finish=done.finish)
        if self._include_usage:
            last += sse.event({**self._chunk, "choices": [], "usage": usage(done.usage)})
        return last

    def whole(self, text: str, scores: tuple[Scored, ...], done: Done) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _scores(scores),
            "finish_reason": done.finish,
        }
        return {**self._head.object("chat.completion"), "choices": [choice], "usage": usage(done.usage)}

    def _event(self, delta: dict[str, Any], *, scores: tuple[Scored, ...] = (), finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": _scores(scores), "finish_reason": finish}
        return sse.event({**self._chunk, "choices": [choice]})


def _scores(scores: tuple[Scored, ...]) -> dict[str, Any] | None:
    if not scores:
        return None
    content = [{**_token(score.chosen), "top_logprobs": [_token(choice) for choice in score.top]} for score in scores]
    return {"content": content, "refusal": None}


def _token(choice: Choice) -> dict[str, Any]:
    return {"token": choice.text, "logprob": logprob(choice.logprob), "bytes": list(choice.raw)}
