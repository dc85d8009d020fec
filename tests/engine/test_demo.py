"""The demo model: the same answers as the GGUF it is cut from, in a folder that transformers loads too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.catalog.checkpoint import open_checkpoint
from freetoken.core.errors import CheckpointError, ConfigInvalid, FileCorrupt, UnsupportedArchitecture
from freetoken.engine.demo import EXPERTS, main, slice_gguf
from tests.fakes.checkpoint import BOS, EOS, oracle, tiny_gguf
from tests.fakes.driver import Driver, engine

torch.set_num_threads(1)

PROMPT = [4, 9, 77, 30, 12, 5, 120, 61, 8, 33, 99]


def _quiet(*_: object) -> None:
    pass


def _gguf(folder: Path, family: str = "llama_tied", **kwargs: Any) -> Path:
    return tiny_gguf(family, folder / "model.gguf", tokenizer=True, **{"quant": "Q4_1", **kwargs})


def _logits(path: Path, prompt: list[int]) -> torch.Tensor:
    driver = Driver(engine(path).runner)
    return driver.logits(driver.sequence(prompt))


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_slicing_in_fp32_changes_nothing(family: str, tmp_path: Path) -> None:
    source, out = _gguf(tmp_path, family), tmp_path / "demo"
    slice_gguf(source, out, _quiet, dtype=torch.float32)
    assert _distance(_logits(out, PROMPT), _logits(source, PROMPT)) < 1e-5
    (_, body), *_ = open_checkpoint(out).spec.routed()
    assert (body.router.experts, body.router.top_k, body.width) == (EXPERTS, EXPERTS, 128 // EXPERTS)


def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "demo"
    slice_gguf(_gguf(tmp_path), out, _quiet)
    with torch.no_grad():
        expected = oracle(out)(torch.tensor([PROMPT])).logits[0, -1]
    assert _distance(_logits(out, PROMPT), expected) < 1e-4
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    messages = [{"role": "user", "content": "the hand"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nthe hand<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(rendered)["input_ids"]) == rendered


def test_the_command_reports_and_finishes(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "demo"
    command = [sys.executable, "-m", "freetoken.engine.demo", str(_gguf(tmp_path)), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1] == {"done": str(out)}
    writing = [line["done"] for line in lines[:-1] if line["phase"] == "write_weights"]
    assert writing == sorted(writing) and writing[-1] == lines[-2]["total"] > 0
    assert sorted(path.name for path in out.parent.iterdir()) == ["demo"]  # no temporary folder is left
    assert open_checkpoint(out).sampling_defaults["temperature"] == 0


def test_every_failure_is_said_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = _gguf(tmp_path), tmp_path / "out"
    whole = source.read_bytes()
    (tmp_path / "short.gguf").write_bytes(whole[: len(whole) // 2])
    assert main([str(tmp_path / "short.gguf"), str(out)]) == 1
    assert main([str(tmp_path / "missing.gguf"), str(out)]) == 1
    assert not out.exists() and not list(tmp_path.glob(".*"))
    out.mkdir()
    assert main([str(source), str(out)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and "exists already" in said[2] and not list(out.iterdir())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3", "llama_linear", "mixtral"])
def test_what_is_no_plain_llama_is_refused(family: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match="layer 0"):
        slice_gguf(_gguf(tmp_path, family, quant="F32"), tmp_path / "out", _quiet)
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_and_a_damaged_file_have_their_codes(tmp_path: Path) -> None:
    source = _gguf(tmp_path)
    with pytest.raises(ConfigInvalid):
        slice_gguf(source, tmp_path, _quiet)
    source.write_bytes(source.read_bytes()[:64])
    with pytest.raises((FileCorrupt, CheckpointError)):
        slice_gguf(source, tmp_path / "out", _quiet)
