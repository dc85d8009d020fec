"""The real demo against transformers, in fp32: the same 64 greedy tokens from the GGUF file and from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from freetoken.engine.demo import slice_gguf
from tests.fakes.driver import Driver, engine

pytestmark = pytest.mark.slow
TOKENS, PAGE, PAGES = 64, 16, 64
PROMPT = [
    1,
    4093,
    198,
    1780,
    314,
    260,
    3575,
    282,
    4649,
    47,
    2,
    198,
    1,
    520,
    9531,
    198,
]  # "What is the capital of France?"


def greedy(path: Path) -> list[int]:
    """PROMPT and 64 tokens more, fp32."""
    driver = Driver(engine(path, pages=PAGES, page_size=PAGE, threads=2).runner, pages=PAGES, page_size=PAGE)
    sequence = driver.sequence(PROMPT)
    driver.generate([sequence], TOKENS)
    return sequence.tokens


def chosen_by(model: Any, tokens: list[int]) -> list[int]:
    """What transformers takes at each place, given all that went before."""
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
    choices: list[int] = logits[len(PROMPT) - 1 :].argmax(-1).tolist()
    return choices


def test_the_gguf_loaded_dense(gguf: Path) -> None:
    tokens = greedy(gguf)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    assert tokens[len(PROMPT) :] == chosen_by(model, tokens)


def test_the_demo_folder_as_mixtral(demo: Path) -> None:
    tokens = greedy(demo)
    model = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32, local_files_only=True)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert tokens[len(PROMPT) :] == chosen_by(model, tokens)


def test_slicing_before_rounding_changes_nothing(gguf: Path, tmp_path: Path) -> None:
    slice_gguf(gguf, tmp_path / "sliced", lambda *_: None, dtype=torch.float32)
    dense, sliced = (
        driver.logits(driver.sequence(PROMPT))
        for driver in (
            Driver(engine(path, pages=PAGES, page_size=PAGE).runner, pages=PAGES, page_size=PAGE)
            for path in (gguf, tmp_path / "sliced")
        )
    )
    assert float((sliced - dense).abs().max() / dense.abs().max()) <= 1e-4
