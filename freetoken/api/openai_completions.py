"""POST /v1/completions: the body to an Ask, the answer to OpenAI's text completion objects. Pure.

Facts: the OpenAI API reference, "Completions (legacy)". Does not know how an answer is made or sent.
"""

from __future__ import annotations

from typing import Any

from freetoken.api import sse
from freetoken.api.assembly import Delta, Done, Scored
from freetoken.api.fields import COMPLETIONS, read_body
from freetoken.api.openai_common import Head, check_stream_options, logprob, sampling, usage
from freetoken.api.pipeline import Ask

DEFAULT_MAX_TOKENS = 16  # the API's own default: a plain completion often has no natural end


def parse(body: bytes, request_id: str) -> tuple[Ask, CompletionWriter, bool]:
    """(what is asked, how to spell the answer, whether to stream). Raises UsageError and its kin."""
    values = read_body(body, COMPLETIONS, required=("model", "prompt"))
    check_stream_options(values)
    head = Head(f"cmpl-{request_id}", values["model"])
    max_tokens = values.get("max_tokens", DEFAULT_MAX_TOKENS)
    ask = Ask(
        id=head.id,
        model=head.model,
        prompt=values["prompt"],
        sampling=sampling(values, logprobs=values.get("logprobs"), max_tokens=max_tokens),
        stop=values.get("stop", ()),
    )
    return ask, CompletionWriter(head, values.get("stream_options", False)), values.get("stream", False)


class CompletionWriter:
    """One text completion (reply.Writer). Chunks and whole answers are the same object."""

    def __init__(self, head: Head, include_usage: bool) -> None:
        self._head = head.object("text_completion")
        self._chunk: dict[str, Any] = self._head | ({"usage": None} if include_usage else {})
        self._include_usage = include_usage

    def start(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        return sse.event({**self._chunk, "choices": [_choice(delta.text, delta.scores)]})

    def end(self, done: Done) -> bytes:
        last = sse.event({**self._chunk, "choices": [_choice("", (), done.finish)]})
        if self._include_usage:
            last += sse.event({**self._chunk, "choices": [], "usage": usage(done.usage)})
        return last

    def whole(self, text: str, scores: tuple[Scored, ...], done: Done) -> dict[str, Any]:
        return {**self._head, "choices": [_choice(text, scores, done.finish)], "usage": usage(done.usage)}


def _choice(text: str, scores: tuple[Scored, ...], finish: str | None = None) -> dict[str, Any]:
    return {"text": text, "index": 0, "logprobs": _scores(scores), "finish_reason": finish}


def _scores(scores: tuple[Scored, ...]) -> dict[str, Any] | None:
    """Four lists side by side. The chosen token is always among its alternatives."""
    if not scores:
        return None
    return {
        "tokens": [score.chosen.text for score in scores],
        "token_logprobs": [logprob(score.chosen.logprob) for score in scores],
        "top_logprobs": [
            {choice.text: logprob(choice.logprob) for choice in (*score.top, score.chosen)} for score in scores
        ],
        "text_offset": [score.offset for score in scores],
    }
