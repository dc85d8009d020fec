"""Every family against transformers (fp32, eager attention), on tiny models whose every tensor is random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.engine.assemble import Engine
from tests.fakes.checkpoint import FAMILIES, GGUF_FAMILIES, VOCAB, build, oracle, tiny, tiny_gguf
from tests.fakes.driver import Driver, engine

torch.set_num_threads(1)

LENGTHS = (37, 5, 70, 18)  # across windows (7, 9), pages of 4, and the block of 64
TOKENS = 64


def _prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Pair:
    """A tiny model, as transformers computes it and as we do."""

    model: Any
    engine: Engine
    expected: dict[int, list[int]]  # prompt length -> 64 greedy tokens

    def driver(self, *, scattered: bool = False) -> Driver:
        return Driver(self.engine.runner, scattered=scattered)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def _greedy(model: Any, prompt: list[int]) -> list[int]:
    """64 tokens; an end-of-sequence token is one like any other."""
    ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.long)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tiny(request.param, tmp_path_factory.mktemp(request.param))
    model = oracle(folder)
    yield Pair(model, engine(folder), {length: _greedy(model, _prompt(length)) for length in LENGTHS})


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_logits(pair: Pair) -> None:
    for length in LENGTHS:
        prompt = _prompt(length)
        for chunk in (512, 7, 1):
            driver = pair.driver(scattered=chunk == 7)
            _close(driver.logits(driver.sequence(prompt), chunk=chunk), pair.logits(prompt))


def test_greedy_alone(pair: Pair) -> None:
    driver = pair.driver()
    assert driver.generate([driver.sequence(_prompt(37))], TOKENS) == [pair.expected[37]]


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("scattered", [False, True])
def test_greedy_in_a_batch_of_different_lengths(pair: Pair, chunk: int, scattered: bool) -> None:
    driver = pair.driver(scattered=scattered)
    batch = [driver.sequence(_prompt(length), name=str(length)) for length in LENGTHS]
    assert driver.generate(batch, TOKENS, chunk=chunk) == list(pair.expected.values())


@pytest.mark.parametrize("scattered", [False, True])
def test_greedy_after_a_prefix_hit(pair: Pair, scattered: bool) -> None:
    driver = pair.driver(scattered=scattered)
    first = driver.sequence(_prompt(70))
    driver.generate([first], 3)
    hit = driver.reuse(first, _prompt(70))
    assert hit.computed == 68  # 17 full pages; the last token is computed anew in a page of its own
    other = driver.reuse(first, _prompt(70)[:37] + _prompt(9, seed=8), name="c")
    assert other.computed == 36
    assert driver.generate([hit], TOKENS) == [pair.expected[70]]
    _close(driver.logits(other), pair.logits(other.tokens))


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "mixtral", "qwen3_moe"])
def test_bf16_weights_stay_close(family: str, tmp_path: Path) -> None:
    """Matrices in bf16 differ by their rounding (8 bits), not more: a wrong fusion or scratch differs by all of it."""
    folder = tiny(family, tmp_path, dtype="bfloat16", norm_topk_prob=True) if family == "qwen3_moe" else None
    folder = folder or tiny(family, tmp_path, dtype="bfloat16")
    exact, rounded = engine(folder, "float32"), engine(folder, "bfloat16")
    prompt = _prompt(37)
    for chunk in (512, 1):
        one, two = Driver(exact.runner), Driver(rounded.runner)
        a, b = one.logits(one.sequence(prompt), chunk=chunk), two.logits(two.sequence(prompt), chunk=chunk)
        assert float((a - b).norm() / a.norm()) < 0.05


@pytest.mark.parametrize("family", GGUF_FAMILIES)
@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
def test_gguf(family: str, quant: str, tmp_path: Path) -> None:
    """The same weights out of a GGUF file: permuted rows, packed experts, quantised blocks."""
    path = tiny_gguf(family, tmp_path / "model.gguf", quant=quant)
    loaded, prompt = engine(path), _prompt(37)
    model = _dequantised(family, quant)
    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    driver = Driver(loaded.runner)
    _close(driver.logits(driver.sequence(prompt)), expected)


def _dequantised(family: str, quant: str) -> Any:
    """transformers' model of what tiny_gguf wrote: its matrices through the gguf package's rounding."""
    raise NotImplementedError
