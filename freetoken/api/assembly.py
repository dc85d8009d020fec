"""Output tokens to pieces of answer: detokenised, cut at stop strings, with their logprobs and counts. Pure.

Does not wait for anything and does not know where the tokens come from (pipeline.py feeds it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from freetoken.core.events import Tokens
from freetoken.core.types import FinishReason, TokenLogprob, Usage
from freetoken.text.codec import TextCodec
from freetoken.text.stop import StopStrings


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that could stand at a place, with the natural log of its probability."""

    text: str
    raw: bytes  # the token's own bytes: part of a character, perhaps
    logprob: float


@dataclass(frozen=True, slots=True)
class Scored:
    """A chosen token, where its text begins in the answer, and the best choices there."""

    chosen: Choice
    top: tuple[Choice, ...]
    offset: int  # characters


@dataclass(frozen=True, slots=True)
class Delta:
    """New text that is certain, and the scores of the tokens that begin in it (where asked for)."""

    text: str
    scores: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer."""

    finish: FinishReason
    usage: Usage


class Assembler:
    """One answer in the making.

    A token's score goes out with the text that begins at it, so scores and text stay in step when text is held back;
    tokens that add no text (end of sequence, what a stop string cut off) have none.
    """

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int], stop: Sequence[str], *, continues: bool) -> None:
        """`continues`: the answer goes on in the prompt's text (a leading space counts), or is a turn of its own."""
        self._codec = codec
        self._detokenizer = codec.detokenizer(prompt_ids if continues else ())
        self._stop = StopStrings(stop)
        self._prompt_tokens = len(prompt_ids)
        self._tokens = 0
        self._cached = 0
        self._decoded = 0  # characters, before stop strings
        self._shown = 0  # characters, after them
        self._held: list[Scored] = []
        self.done: Done | None = None  # set by the push that ends the answer

    def push(self, event: Tokens) -> Delta | None:
        """The next event's share of the answer; None when nothing of it can be shown yet."""
        self._cached = self._cached if event.cached is None else event.cached
        shown = []
        hit = False
        for i, token in enumerate(event.token_ids):
            if event.logprobs:
                self._held.append(self._scored(event.logprobs[i]))
            self._tokens += 1
            text, hit = self._pass(self._detokenizer.push((token,)))
            shown.append(text)
            if hit:
                break
        if event.finish and not hit:
            text, hit = self._pass(self._detokenizer.flush())
            shown += text, self._stop.flush()
        if hit:
            self.done = Done(FinishReason.STOP, self._usage(None))
        elif event.finish:
            self.done = Done(event.finish, self._usage(event.limited_by))
        return self._delta("".join(shown))

    def _pass(self, text: str) -> tuple[str, bool]:
        self._decoded += len(text)
        return self._stop.push(text)

    def _delta(self, text: str) -> Delta | None:
        if not text:
            return None
        self._shown += len(text)
        return Delta(text, tuple(self._begun()) if self._held else ())

    def _begun(self) -> Iterator[Scored]:
        count = sum(scored.offset < self._shown for scored in self._held)
        yield from self._held[:count]
        del self._held[:count]

    def _scored(self, score: TokenLogprob) -> Scored:
        top = tuple(self._choice(token, logprob) for token, logprob in score.top)
        return Scored(self._choice(score.token_id, score.logprob), top, self._decoded)

    def _choice(self, token: int, logprob: float) -> Choice:
        return Choice(self._codec.token_text(token), self._codec.token_bytes(token), logprob)

    def _usage(self, limited_by: str | None) -> Usage:
        return Usage(self._prompt_tokens, self._tokens, self._cached, limited_by)
