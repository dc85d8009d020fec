"""`ft chat`: a conversation in the terminal, over the same /v1/chat/completions that every other client uses.

Answers stream to stdout, the counts after them go to stderr. Does not know templates or tokens.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from freetoken.cli import output
from freetoken.cli.session import connect
from freetoken.core.errors import FreeTokenError, ModelNotLoaded, UsageError
from freetoken.core.units import Seconds

if TYPE_CHECKING:
    from freetoken.client.control import ControlClient

INTERRUPTED = 130
HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("chat", help="Talk to the loaded model. Piped text is one question.")(chat)


def chat(
    model: Annotated[str | None, typer.Option(help="Model id; without it the loaded one.")] = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the whole conversation.")] = None,
    ask: Annotated[str | None, typer.Option(help="One question: print the answer and exit.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample among the k likeliest; 0: all.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats an answer.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one JSON object.")] = False,
) -> None:
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, "max_tokens": max_tokens}
    question = ask if ask is not None or sys.stdin.isatty() else sys.stdin.read().strip()
    if question == "":
        raise UsageError("the question is empty", fixes=('ft chat --ask "..."',))
    with connect() as client:
        talk = Conversation(client, model or _loaded_model(client), system, _given(sampling), as_json=as_json)
        if question is None:
            interact(talk)
        elif talk.ask(question).stopped:
            raise typer.Exit(INTERRUPTED)


def interact(talk: Conversation) -> None:
    """Read questions from the terminal until the user leaves; an error ends an answer, not the conversation."""
    output.note(f"{talk.model}. {HELP}")
    for line in _lines():
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                talk.reset()
                output.note("the conversation begins anew")
            case "/help":
                output.note(HELP)
            case command if command.startswith("/"):
                output.note(f"{command.split()[0]} is not a command. {HELP}")
            case question:
                try:
                    talk.ask(question)
                except FreeTokenError as error:
                    talk.forget_question()
                    output.complain(error, as_json=talk.as_json)


@dataclass
class Answer:
    """One answer and what it took, as seen from here: the clock starts when the question is sent."""

    sent: float = field(default_factory=time.monotonic)
    text: str = ""
    finish: str | None = None
    first: float | None = None  # time.monotonic() of the first text, seconds
    last: float | None = None
    tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    stopped: bool = False  # by the user

    @property
    def first_token_s(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def tok_s(self) -> float | None:
        """Tokens a second after the first one; None where there is nothing to divide by."""
        if self.tokens is None or self.tokens < 2 or self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)

    def facts(self) -> dict[str, Any]:
        """For --json."""
        first_s = self.first_token_s
        return {
            "answer": self.text,
            "finish_reason": self.finish,
            "stopped": self.stopped,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "tok_s": None if self.tok_s is None else round(self.tok_s, 2),
            "first_token_ms": None if first_s is None else round(first_s * 1000),
        }

    def summary(self) -> str:
        """For people: `42 tokens · 31.0 tok/s · first token 120 ms`."""
        parts = ["stopped"] if self.stopped else []
        if self.tokens is not None:
            parts.append(f"{self.tokens} tokens")
        if self.tok_s is not None:
            parts.append(f"{self.tok_s:.1f} tok/s")
        if self.first_token_s is not None:
            parts.append(f"first token {Seconds(self.first_token_s)}")
        if self.finish == "length":
            parts.append("cut at the length limit")
        return " · ".join(parts)


class Conversation:
    """The messages so far and how they are answered."""

    def __init__(
        self, client: ControlClient, model: str, system: str | None, sampling: dict[str, Any], *, as_json: bool
    ) -> None:
        self.model = model
        self.as_json = as_json
        self._client = client
        self._sampling = sampling
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)

    def reset(self) -> None:
        """Forget everything but the instructions."""
        self._messages = list(self._start)

    def forget_question(self) -> None:
        """Take back a question that got no answer, so that roles go on alternating."""
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()

    def ask(self, question: str) -> Answer:
        """Send a question and show its answer. Ctrl-C stops the answer and keeps what came."""
        self._messages.append({"role": "user", "content": question})
        answer = Answer()
        try:
            self._stream(answer)
        except KeyboardInterrupt:
            answer.stopped = True
        if answer.text:
            self._messages.append({"role": "assistant", "content": answer.text})
        else:
            self.forget_question()
        if self.as_json:
            output.emit(answer.facts())
        else:
            typer.echo()
            output.note(answer.summary())
        return answer

    def _stream(self, answer: Answer) -> None:
        request = {"model": self.model, "messages": self._messages, **self._sampling}
        with closing(self._client.chat(request)) as pieces:  # closing it early cancels the request
            for piece in pieces:
                if piece.text:
                    answer.last = time.monotonic()
                    answer.first = answer.first or answer.last
                    answer.text += piece.text
                    if not self.as_json:
                        typer.echo(_shown(piece.text), nl=False)
                answer.finish = piece.finish or answer.finish
                if piece.completion_tokens is not None:
                    answer.tokens, answer.prompt_tokens = piece.completion_tokens, piece.prompt_tokens
                    answer.cached_tokens = piece.cached_tokens


def _lines() -> Iterator[str]:
    """What is typed, with line editing where the platform has it, until the end of input."""
    with suppress(ImportError):  # Windows has its own editing
        import readline  # noqa: F401  the import is what gives input() line editing
    while True:
        try:
            yield input("> ")
        except EOFError:
            typer.echo()
            return


def _loaded_model(client: ControlClient) -> str:
    engine = client.engine()
    if engine.get("model") and engine.get("state") not in ("stopped", "failed"):
        return str(engine["model"])
    raise ModelNotLoaded("no model is loaded", fixes=("ft load MODEL", "ft pull demo, then ft load demo"))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _shown(text: str) -> str:
    """Text of a model for a terminal: without the control characters that could drive it."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t" or ord(char) > 0x9F)
