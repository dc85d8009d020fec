"""The tokenizer, special tokens and chat templates of a model, from a Hugging Face folder or a GGUF file.

Facts: tokenizer.json (tokenizers' own format); tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
chat_template.json and additional_chat_templates/ as transformers saves them; tokenizer.chat_template and
tokenizer.ggml.* (GGUF specification). Imports the tokenizers package only when it loads: it costs more memory than the
idle daemon has. Does not know how text is streamed (detokenize.py) or templates run (template.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freetoken.core.errors import FileCorrupt, TokenizerMissing
from freetoken.text.gguf_tokenizer import Vocabulary, build_tokenizer, damage_reported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from freetoken.catalog.checkpoint import TextSource

DEFAULT, TOOL_USE = "default", "tool_use"  # names of chat templates
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
LARGEST_JSON = 256 << 20  # bytes; the largest tokenizer.json known is 34 MB


@dataclass(frozen=True, slots=True)
class TextFiles:
    """What a model's files say about text."""

    tokenizer: Tokenizer
    templates: Mapping[str, str] = field(default_factory=dict)  # name -> Jinja source
    special: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ... -> text, for templates


def load_text(source: TextSource) -> TextFiles:
    """Read everything; blocking. Raises TokenizerMissing or FileCorrupt."""
    return read_gguf_text(source.path) if source.kind == "gguf" else read_hf_text(source.path)


# ── Hugging Face folders ────────────────────────────────────────────────────────────────────────────────────────────
def read_hf_text(folder: Path) -> TextFiles:
    """tokenizer.json decides what is put around a text: add_bos_token in tokenizer_config.json was for tokenizers
    without one, and transformers leaves it out of account too."""
    config = _json(folder / "tokenizer_config.json")
    special = _special_tokens(_json(folder / "special_tokens_map.json")) | _special_tokens(config)
    tokenizer = _tokenizer_json(folder / "tokenizer.json")
    _add_special(tokenizer, special)
    return TextFiles(tokenizer, _hf_templates(folder, config), special)


def _tokenizer_json(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    if not path.is_file():
        raise TokenizerMissing(
            f"{path.parent.name} has no tokenizer.json.",
            fixes=(
                "Download tokenizer.json from the model's repository into the folder.",
                "Where the repository has only tokenizer.model or vocab.json: load it once with transformers "
                "and save_pretrained() the tokenizer.",
            ),
        )
    _check_size(path)
    with damage_reported(f"{path.name} cannot be read"):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()  # both are settings of somebody's training run
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text; a token is written as text or as an object with `content`."""
    found = {name: config.get(name) for name in NAMES}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _add_special(tokenizer: Tokenizer, special: Mapping[str, str]) -> None:
    """Named tokens are special even where tokenizer.json does not say so; those outside the vocabulary are left out."""
    from tokenizers import AddedToken

    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [text for text in special.values() if text not in known and tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _hf_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Later sources win: tokenizer_config.json, chat_template.json, additional_chat_templates/, chat_template.jinja."""
    templates = _named(config.get("chat_template")) | _named(_json(folder / "chat_template.json").get("chat_template"))
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _text(path)
    if (path := folder / "chat_template.jinja").is_file():
        templates[DEFAULT] = _text(path)
    return templates


def _named(template: object) -> dict[str, str]:
    """One template, or a list of {"name", "template"}."""
    match template:
        case str():
            return {DEFAULT: template}
        case list():
            return {entry["name"]: entry["template"] for entry in template if _is_named(entry)}
        case _:
            return {}


def _is_named(entry: object) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "template"))


def _json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise FileCorrupt(f"{path.name} is not JSON: {error}.", fixes=("Download the file again.",)) from error
    if not isinstance(value, dict):
        raise FileCorrupt(f"{path.name} holds {type(value).__name__} where an object is expected.")
    return value


def _text(path: Path) -> str:
    _check_size(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileCorrupt(f"{path.name} is not UTF-8: {error}.", fixes=("Download the file again.",)) from error


def _check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise FileCorrupt(
            f"{path.name} has {size} bytes; at most {LARGEST_JSON} are read.",
            numbers={"found": size, "limit": LARGEST_JSON},
        )


# ── GGUF files ──────────────────────────────────────────────────────────────────────────────────────────────────────
def read_gguf_text(path: Path) -> TextFiles:
    from freetoken.catalog.gguf import read_gguf

    return gguf_text(read_gguf(path).metadata)


def gguf_text(metadata: Mapping[str, object]) -> TextFiles:
    """The same facts from GGUF metadata. Further templates lie under tokenizer.chat_template.NAME."""
    prefix = "tokenizer.chat_template"
    named = {
        key.removeprefix(prefix).lstrip(".") or DEFAULT: value for key, value in metadata.items() if _at(key, prefix)
    }
    vocabulary = Vocabulary(metadata)
    ids = {name: vocabulary.id_of(key) for name, key in GGUF_NAMES.items()}
    return TextFiles(
        build_tokenizer(metadata),
        {name: template for name, template in named.items() if isinstance(template, str)},
        {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None},
    )


def _at(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")
