"""Every family against transformers (fp32, eager attention), on tiny models whose every tensor is random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.engine.assemble import Engine
from tests.fakes.checkpoint import FAMILIES, VOCAB, build, oracle, tiny, tiny_gguf
from tests.fakes.driver import Driver, Generation, engine

torch.set_num_threads(1)

QUICK = ("llama3", "qwen2", "qwen3_moe", "mixtral")  # between them every field; the rest run with the slow tests
LENGTHS = (37, 5, 70, 18)  # across windows (7, 9), pages of 4, and the block of 64
TOKENS = 64


def _prompt(length: int, seed: int = 3) -> list[int]:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Pair:
    """A tiny model, as transformers computes it and as we do."""

    model: Any
    engine: Engine

    def driver(self, *, scattered: bool = False) -> Driver:
        return Driver(self.engine.runner, scattered=scattered)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """(tokens, vocab) f32"""
        with torch.no_grad():
            return self.model(torch.tensor([tokens]), use_cache=False).logits[0]

    def chooses(self, generation: Generation) -> bool:
        """Whether transformers, given the prompt and the output so far, chooses each output token: greedy identity."""
        logits = self.logits(generation.tokens[:-1])[generation.prompt_len - 1 :]
        return logits.argmax(-1).tolist() == generation.output and len(generation.output) == TOKENS


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tiny(request.param, tmp_path_factory.mktemp(request.param))
    return Pair(oracle(folder), engine(folder))


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


@pytest.mark.parametrize("chunk", [512, 7, 1])
def test_logits(pair: Pair, chunk: int) -> None:
    for length in LENGTHS:
        driver = pair.driver(scattered=chunk == 7)
        prompt = _prompt(length)
        _close(driver.logits(driver.sequence(prompt), chunk=chunk), pair.logits(prompt)[-1])


def test_greedy_alone(pair: Pair) -> None:
    driver = pair.driver()
    alone = driver.sequence(_prompt(37))
    driver.generate([alone], TOKENS)
    assert pair.chooses(alone)


@pytest.mark.parametrize(("chunk", "scattered"), [(512, False), (7, True)])
def test_greedy_in_a_batch_of_different_lengths(pair: Pair, chunk: int, scattered: bool) -> None:
    driver = pair.driver(scattered=scattered)
    batch = [driver.sequence(_prompt(length), name=str(length)) for length in LENGTHS]
    driver.generate(batch, TOKENS, chunk=chunk)
    assert all(pair.chooses(one) for one in batch)


@pytest.mark.parametrize("scattered", [False, True])
def test_greedy_after_a_prefix_hit(pair: Pair, scattered: bool) -> None:
    driver = pair.driver(scattered=scattered)
    first = driver.sequence(_prompt(70))
    driver.generate([first], 3)
    hit = driver.reuse(first, _prompt(70))
    assert hit.computed == 68  # 17 full pages; the last token is computed anew in a page of its own
    other = driver.reuse(first, _prompt(70)[:37] + _prompt(9, seed=8), name="c")
    assert other.computed == 36
    driver.generate([hit, other], TOKENS)
    assert pair.chooses(hit) and pair.chooses(other)


_DENSE_ENOUGH = {"mixtral": {"num_experts_per_tok": 8}}  # every expert chosen: no near-tie can flip


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "mixtral"])
@pytest.mark.parametrize("chunk", [512, 1])
def test_bf16_weights_stay_close(family: str, chunk: int, tmp_path: Path) -> None:
    """Matrices in bf16 differ by their rounding (8 bits), not more: a wrong fusion or scratch differs by all of it."""
    folder = tiny(family, tmp_path, dtype="bfloat16", **_DENSE_ENOUGH.get(family, {}))
    rows = []
    for dtype in ("float32", "bfloat16"):
        driver = Driver(engine(folder, dtype).runner)
        rows.append(driver.logits(driver.sequence(_prompt(37)), chunk=chunk))
    assert float((rows[0] - rows[1]).norm() / rows[0].norm()) < 0.05


_SAYABLE: dict[str, dict[str, Any]] = {  # what GGUF can say of them
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
    "mixtral": {"sliding_window": None},
}


@pytest.mark.parametrize("family", _SAYABLE)
@pytest.mark.parametrize("quant", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_gguf(family: str, quant: str, tmp_path: Path) -> None:
    """The same weights out of a GGUF file: permuted rows, packed experts, quantised blocks."""
    path = tiny_gguf(family, tmp_path / "model.gguf", quant=quant, packed=quant != "F16", **_SAYABLE[family])
    driver, prompt = Driver(engine(path).runner), _prompt(37)
    with torch.no_grad():
        expected = _rounded(build(family, **_SAYABLE[family]), quant)(torch.tensor([prompt])).logits[0, -1]
    _close(driver.logits(driver.sequence(prompt)), expected)


def _rounded(model: Any, quant: str) -> Any:
    """The model with its matrices, but for routers, through the gguf package's rounding."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[quant]
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and not name.endswith("mlp.gate.weight"):
            packed = gguf.quants.quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(packed, kind)).view(parameter.shape)
    return model
