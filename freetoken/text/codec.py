"""TextCodec: one model's tokenizer and chat template, together. What the API knows of text goes through here.

Importing this is cheap; loading is not (0.3 to 0.8 s, 100 to 230 MiB) and belongs in a thread. Does not know HTTP,
engines or stop strings (stop.py).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from freetoken.core.errors import TemplateError
from freetoken.text.detokenize import Detokenizer, Spelling
from freetoken.text.messages import prepare
from freetoken.text.template import TemplateLimits, TemplateSandbox
from freetoken.text.tokenizer import DEFAULT, TOOL_USE, TextFiles, load_text

if TYPE_CHECKING:
    from freetoken.catalog.checkpoint import TextSource

NO_TEMPLATE_FIXES = ("Use /v1/completions.", "Put a chat_template.jinja into the model's folder and load it again.")


class TextCodec:
    """Text <-> token ids, and messages -> text. Safe to use from several threads."""

    vocab_size: int  # tokens, added ones included
    has_template: bool
    special_ids: frozenset[int]  # tokens that are never shown: end of turn and the like
    template_fault: str | None  # why the chat template does not compile; completions work all the same

    def __init__(self, files: TextFiles, limits: TemplateLimits | None = None) -> None:
        """Starts the template's process where there is a template. `load` is the usual way in."""
        self._tokenizer = files.tokenizer
        self._encoding = threading.Lock()  # over encode_special_tokens, a setting of the tokenizer
        self._templates, self._special = files.templates, dict(files.special)
        added = files.tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = files.tokenizer.get_vocab_size(with_added_tokens=True)
        self._spelling = Spelling.of(files.tokenizer, self.special_ids)
        self.has_template = bool(files.templates)
        self._sandbox = TemplateSandbox(limits)
        self.template_fault = self._check_templates()

    @classmethod
    def load(cls, source: TextSource) -> TextCodec:
        """Read and build; blocking. Raises TokenizerMissing or FileCorrupt."""
        return cls(load_text(source))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of `text`. special: special tokens written in it are taken as such, and the tokenizer adds its own
        (bos); otherwise all of it is plain text."""
        with self._encoding:
            self._tokenizer.encode_special_tokens = not special
            return list(self._tokenizer.encode(_whole(text), add_special_tokens=special).ids)

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered template: special tokens are taken as such, none is added, for it wrote them all."""
        with self._encoding:
            self._tokenizer.encode_special_tokens = False
            return list(self._tokenizer.encode(_whole(rendered), add_special_tokens=False).ids)

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """A stream of text. With `prompt_ids` it goes on from them: a leading space is kept."""
        return Detokenizer(self._spelling, prompt_ids)

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones too; bytes that are no character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._spelling.bytes_of(token_id)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages` (any OpenAI messages: see messages.prepare). `kwargs` reach the template.

        Raises TemplateError (refused, too slow, too large, no template), MalformedBody, UnsupportedContent.
        """
        if self.template_fault is not None:
            raise TemplateError(self.template_fault, fixes=NO_TEMPLATE_FIXES)
        values = {**self._special, **kwargs, "add_generation_prompt": add_generation_prompt, "tools": tools or None}
        return await self._sandbox.render(self._template(bool(tools)), values | {"messages": prepare(messages)})

    def close(self) -> None:
        """End the template's process. The tokenizer goes with the last reference."""
        self._sandbox.close()

    def _template(self, with_tools: bool) -> str:
        names = (TOOL_USE, DEFAULT) if with_tools else (DEFAULT,)
        template = next((self._templates[name] for name in names if name in self._templates), None)
        if template is None:
            have = f"; it has {', '.join(sorted(self._templates))}" if self._templates else ""
            raise TemplateError(
                f"The model has no default chat template{have}.",
                fixes=NO_TEMPLATE_FIXES,
            )
        return template

    def _check_templates(self) -> str | None:
        for name, template in self._templates.items():
            try:
                self._sandbox.check(template)
            except TemplateError as error:
                return f"The model's chat template ({name}) cannot be used: {error.detail}"
        return None


def _whole(text: str) -> str:
    """Halves of surrogate pairs, left where a client cut a string, become U+FFFD: tokenizers take UTF-8 only."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
