"""A tokenizers.Tokenizer from the vocabulary that a GGUF file carries (tokenizer.ggml.*).

Two models: `gpt2`, byte-level BPE with merges and a named rule for cutting text into words, and `llama`, SentencePiece
BPE, whose merges are recovered from the scores. Keys and token types: the GGUF specification (github.com/ggml-org/ggml,
docs/gguf.md). The rules behind the names are those of the models' own tokenizer.json files.
Does not know files (catalog/gguf.py reads them) nor templates (tokenizer.py takes those).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from freetoken.core.errors import FileCorrupt, FreeTokenError, TokenizerMissing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPACE = "\u2581"  # SentencePiece's mark for a space


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# ── how byte-level vocabularies cut text into words ─────────────────────────────────────────────────────────────────
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Patterns that split the text one after the other, each match and each gap a piece; and what goes with them."""

    splits: tuple[str, ...]
    nfc: bool = False  # compose characters first
    whole_words: bool = False  # a word that is a token is taken as it is, before any merge
    add_bos: bool = False  # where the file does not say


_GPT2 = Rule((GPT2,))
_DIGITS = Rule((r"\p{N}", GPT2))
_LLAMA3 = Rule((LLAMA3,), whole_words=True, add_bos=True)
_QWEN2 = Rule((QWEN2,), nfc=True)

RULES: Mapping[str, Rule] = {
    "default": Rule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": Rule((LLAMA3,)),
    "dbrx": Rule((LLAMA3,)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": Rule((QWEN2,)),
    "tekken": Rule((TEKKEN,), whole_words=True, add_bos=True),
}


def build_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer of `metadata`. Adds bos and eos to what it encodes as the file says.

    Raises TokenizerMissing for a model or a splitting rule that is not known, FileCorrupt for tables that do not fit
    each other.
    """
    vocabulary = Vocabulary(metadata)
    build = BUILDERS.get(vocabulary.model)
    if build is None:
        raise TokenizerMissing(
            f"The GGUF file has a tokenizer of model {vocabulary.model!r}; supported: {', '.join(BUILDERS)}.",
            fixes=("Use the model's Hugging Face folder, which has a tokenizer.json.",),
        )
    with damage_reported("The GGUF file's tokenizer cannot be built"):
        return build(vocabulary)


@contextmanager
def damage_reported(what: str) -> Iterator[None]:
    """Errors of the tokenizers package as FileCorrupt: it raises bare Exception for tables that contradict each other,
    and panics of its Rust code arrive as a BaseException that can only be told by its name."""
    try:
        yield
    except FreeTokenError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FileCorrupt(f"{what}: {error}.", fixes=("Download the file again.",)) from error


class Vocabulary:
    """The tokenizer.ggml.* keys, their types checked when read."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.model: str = self.get("model", str, "")
        self.tokens: list[str] = self._column("tokens", str)
        if not self.tokens:
            raise TokenizerMissing("The GGUF file has no tokenizer.ggml.tokens.")
        self.types: list[int] = self._column("token_type", int) or [TokenType.NORMAL] * len(self.tokens)
        self.scores: list[float] = self._column("scores", float)
        for name, column in (("token_type", self.types), ("scores", self.scores)):
            if column and len(column) != len(self.tokens):
                raise FileCorrupt(
                    f"tokenizer.ggml.{name} has {len(column)} entries for {len(self.tokens)} tokens.",
                    numbers={"found": len(column), "expected": len(self.tokens)},
                )
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and not isinstance(value, kind):
            raise FileCorrupt(f"tokenizer.ggml.{key} is {type(value).__name__}; expected {kind.__name__}.")
        return value

    def id_of(self, name: str) -> int | None:
        """The id in key NAME_token_id; None when absent."""
        token_id: int | None = self.get(f"{name}_token_id", int)
        if token_id is not None and not 0 <= token_id < len(self.tokens):
            raise FileCorrupt(
                f"tokenizer.ggml.{name}_token_id is {token_id}; the file has {len(self.tokens)} tokens.",
                numbers={"id": token_id, "tokens": len(self.tokens)},
            )
        return token_id

    def of_type(self, *kinds: TokenType) -> list[int]:
        return [i for i, kind in enumerate(self.types) if kind in kinds]

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._column("merges", str):
            left, space, right = merge.partition(" ")
            if not (left and space and right):
                raise FileCorrupt(f"tokenizer.ggml.merges has an entry that is not two tokens: {merge[:40]!r}.")
            pairs.append((left, right))
        return pairs

    def _column(self, key: str, kind: type) -> list[Any]:
        column = self._metadata.get(f"tokenizer.ggml.{key}")
        if column is None:
            return []
        if not isinstance(column, list | tuple) or not all(isinstance(value, kind) for value in column):
            raise FileCorrupt(f"tokenizer.ggml.{key} is not an array of {kind.__name__}.")
        return list(column)


# ── the two models ──────────────────────────────────────────────────────────────────────────────────────────────────
def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = vocabulary.get("pre", str, "default")
    rule = RULES.get(name)
    if rule is None:
        raise TokenizerMissing(
            f"The GGUF file's tokenizer cuts text by the rule {name!r}, which is not known; known: {', '.join(RULES)}.",
            fixes=("Use the model's Hugging Face folder, which has a tokenizer.json.",),
        )
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=rule.whole_words, fuse_unk=False)
    )
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.splits]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, spell])
    tokenizer.decoder = decoders.ByteLevel()
    _finish(tokenizer, vocabulary, add_bos=rule.add_bos)
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = vocabulary.id_of("unknown")
    unknown = next(iter(vocabulary.of_type(TokenType.UNKNOWN)), None) if unknown is None else unknown
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=vocabulary.merges() or list(_merges_from_scores(vocabulary)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.get("add_space_prefix", bool, True)
    mark = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), mark]) if prefix else mark
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _finish(tokenizer, vocabulary, add_bos=True)
    return tokenizer


BUILDERS: Mapping[str, Callable[[Vocabulary], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges_from_scores(vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    """Every way to make a token of two others, best score first.

    SentencePiece joins the neighbours whose union scores best; a merge list in that order makes the same choices.
    """
    if not vocabulary.scores:
        raise FileCorrupt("The GGUF file's tokenizer has neither tokenizer.ggml.merges nor tokenizer.ggml.scores.")
    joined = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    pieces = {vocabulary.tokens[i]: i for i in vocabulary.of_type(*joined)}
    for piece in sorted(pieces, key=lambda piece: -vocabulary.scores[pieces[piece]]):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [pair for pair in cuts if pair[0] in pieces and pair[1] in pieces]
        yield from sorted(pairs, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))


def _finish(tokenizer: Tokenizer, vocabulary: Vocabulary, *, add_bos: bool) -> None:
    """Tokens that are found whole in text, and those put around it."""
    from tokenizers import AddedToken, processors

    ends = [i for name in ("bos", "eos", "eot") if (i := vocabulary.id_of(name)) is not None]
    special = {*vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN), *ends}
    whole = sorted({*special, *vocabulary.of_type(TokenType.USER_DEFINED)})
    texts = [(text, i in special) for i in whole if (text := vocabulary.tokens[i])]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=is_special) for text, is_special in texts])
    bos = vocabulary.id_of("bos") if vocabulary.get("add_bos_token", bool, add_bos) else None
    eos = vocabulary.id_of("eos") if vocabulary.get("add_eos_token", bool, False) else None
    around = {vocabulary.tokens[i]: i for i in (bos, eos) if i is not None}
    before, after = ([] if i is None else [vocabulary.tokens[i]] for i in (bos, eos))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after], special_tokens=list(around.items())
    )
