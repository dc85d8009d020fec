"""Small tokenizers of the kinds that models use, trained here: the tokenizers package is the oracle of this folder."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, twice: 1234 times in 2024. Don't they're I'LL!",
    "日本語のテキストと中文测试，还有한국어。" * 3,
    "naïve café übergroß 😀😀👩\u200d👩\u200d👧 done  done   done\n\n\tdef f(x):\n\t\treturn x ** 2\n",
    "the the the quick quick brown brown over over lazy lazy " * 5,
] * 4
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """Byte-level BPE as GPT-2's, with special tokens and one added token that is shown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.add_tokens([AddedToken("<think step>", special=False, normalized=False)])
    return tokenizer


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """BPE with marked spaces and byte fallback as Llama 2's: normalizer Prepend and Replace, bos before the text."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trained.train_from_iterator(CORPUS[:1] * 3 + CORPUS[3:4], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *(piece for piece, _ in pieces)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=_merges(trained),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
