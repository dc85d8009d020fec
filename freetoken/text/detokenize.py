"""Token ids to text as they come: only text that is certain, each token looked at once.

A tokenizer's decoder is read once into a `Spelling`: the bytes of every token, and how many leading spaces the decoder
takes off the whole text. After that a stream is an incremental UTF-8 decoder over those bytes, so a character whose
bytes are spread over tokens appears when its last byte does. The result is the tokenizer's own decode of the whole
sequence, special tokens left out. One difference is wanted: in a run of byte tokens (`<0xE2>` ...) that is not valid
UTF-8 as a whole, characters that are complete are kept, because they were shown when they were complete.

Does not know the tokenizers package beyond two methods of the object it is given, nor stop strings (stop.py).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from freetoken.core.errors import TokenizerMissing

PROMPT_TAIL = 16  # tokens of the prompt that are read again: more than the bytes of one character can be spread over
EACH_BYTE = "freetoken.each_byte"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SUPPORTED = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip")


class TokenizerLike(Protocol):
    """What is needed of a tokenizers.Tokenizer."""

    @property
    def decoder(self) -> Any: ...
    def id_to_token(self, id: int) -> str | None: ...


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters: character -> byte. Printable Latin-1 stands for itself,
    every other byte, in order, for the characters from U+0100 on (github.com/openai/gpt-2, encoder.py)."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Decoding error handler: one U+FFFD for each byte, as the ByteFallback decoder writes them."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _each_byte)


@dataclass(slots=True)
class Spelling:
    """What the tokens of one tokenizer are in bytes. Filled as tokens are met: a vocabulary is large, its use small."""

    token_of: Callable[[int], str | None]
    special_ids: frozenset[int] = frozenset()
    replaces: list[tuple[str, str]] = field(default_factory=list)
    byte_level: dict[str, int] | None = None
    byte_fallback: bool = False
    between: str = ""  # joins tokens
    strip: int = 0  # spaces taken off the start of the whole text
    first_drops: str | None = None  # a character that the first token loses everywhere
    _known: dict[int, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: TokenizerLike, special_ids: frozenset[int] = frozenset()) -> Spelling:
        """Read the decoder of `tokenizer`. Raises TokenizerMissing for a kind that cannot be streamed exactly."""
        spelling = cls(tokenizer.id_to_token, special_ids)
        if tokenizer.decoder is None:  # the package then joins tokens by spaces
            spelling.between, spelling.strip = " ", 1
            return spelling
        for step in _steps(json.loads(tokenizer.decoder.__getstate__())):
            spelling._add(step)
        return spelling

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token, special or not; b"" for an id that is not in the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            token = self.token_of(token_id) if token_id >= 0 else None
            known = self._known[token_id] = self._spell(token) if token is not None else b""
        return known

    def bytes_of_first(self, token_id: int) -> bytes:
        """The bytes of a token that opens the text."""
        token = self.token_of(token_id) if token_id >= 0 else None
        if self.first_drops is None or token is None:
            return self.bytes_of(token_id)
        return self._spell(token.replace(self.first_drops, ""))

    @property
    def errors(self) -> str:
        """The codecs error handler that writes malformed bytes as this tokenizer does."""
        return EACH_BYTE if self.byte_fallback else "replace"

    def _add(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self.byte_level = byte_alphabet()
            case {"type": "ByteFallback"}:
                self.byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Metaspace", "replacement": mark}:
                self.replaces.append((mark, " "))
                self.first_drops = None if step.get("prepend_scheme") == "never" else mark
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self.replaces.append((old, new))
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                self.strip = start
            case _:
                raise TokenizerMissing(
                    f"The tokenizer's decoder has a step {json.dumps(step)[:200]}, which is not supported; "
                    f"supported steps: {', '.join(SUPPORTED)}."
                )

    def _spell(self, token: str) -> bytes:
        for old, new in self.replaces:
            token = token.replace(old, new)
        if self.byte_fallback and (byte := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if self.byte_level is not None and all(char in self.byte_level for char in token):
            return bytes(map(self.byte_level.__getitem__, token))
        return (self.between + token).encode()


def _steps(decoder: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The decoder's steps in order, sequences opened."""
    if decoder.get("type") != "Sequence":
        yield decoder
        return
    for step in decoder["decoders"]:
        yield from _steps(step)


class Detokenizer:
    """One stream of tokens. After a prompt, text goes on from it: a leading space stays."""

    def __init__(self, spelling: Spelling, prompt_ids: Sequence[int] = ()) -> None:
        self._spelling = spelling
        self._decoder = codecs.getincrementaldecoder("utf-8")(spelling.errors)
        self._to_strip = spelling.strip
        self._opened = False
        self._go_on_from(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the new text that is certain. Special tokens and unknown ids are not shown."""
        return self._strip(self._decoder.decode(b"".join(map(self._bytes, token_ids))))

    def flush(self) -> str:
        """What an unfinished character at the end comes to: U+FFFD. Call once, after the last token."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._spelling.special_ids:
            return b""
        if self._opened:
            return self._spelling.bytes_of(token_id)
        data = self._spelling.bytes_of_first(token_id)
        self._opened = self._spelling.token_of(token_id) is not None
        return data

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            self._to_strip -= 1
            if text[0] != " ":
                self._to_strip = 0
                break
            text = text[1:]
        return text

    def _go_on_from(self, prompt_ids: Sequence[int]) -> None:
        shown = [i for i in prompt_ids[-PROMPT_TAIL:] if i not in self._spelling.special_ids]
        if shown:
            self._opened, self._to_strip = True, 0
            self._decoder.decode(b"".join(map(self._spelling.bytes_of, shown)))
