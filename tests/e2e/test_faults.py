"""What goes wrong is said, and nothing is lost by it: a killed engine, and bad model folders, through the daemon."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest
from safetensors.numpy import save_file as save_numpy

from tests.e2e.conftest import Person
from tests.fakes.checkpoint import tiny

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_an_engine_killed_in_mid_stream_ends_the_stream_and_nothing_else(person: Person) -> None:
    body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with person.daemon():
        person.ft("load", "demo")
        with httpx.stream("POST", f"{person.url}/v1/completions", json=body, timeout=60, trust_env=False) as response:
            lines = response.iter_lines()
            while not next(lines).startswith("data: {"):
                pass
            with person.control() as control:
                os.kill(control.engine()["pid"], signal.SIGKILL)
            killed = time.monotonic()
            rest = [line for line in lines if line.startswith("data: ")]
            assert time.monotonic() - killed < 1.0
        assert json.loads(rest[-1][6:])["error"]["freetoken_code"] == "ENGINE_DIED"
        assert "[DONE]" not in rest[-1]
        engine = person.ft_json("status")
        assert "SIGKILL" in json.dumps(engine) or "signal 9" in json.dumps(engine)
        person.ft("load", "demo")
        assert "Paris" in person.ft("chat", "--temperature", "0", "--ask", "What is the capital of France?").stdout


def spoil(folder: Path, how: str) -> None:
    weights = next(folder.glob("*.safetensors"))
    config = folder / "config.json"
    if how == "no config":
        config.unlink()
    elif how == "unknown architecture":
        document = json.loads(config.read_text()) | {"model_type": "zebra", "architectures": ["ZebraForCausalLM"]}
        config.write_text(json.dumps(document))
    elif how == "shard missing":
        weights.unlink()
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "pickle only":
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    elif how == "another model's tensors":
        import numpy

        for file in folder.glob("*.safetensors*"):
            file.unlink()
        save_numpy({"model.embed_tokens.weight": numpy.zeros((4, 4), numpy.float32)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("no config", "CONFIG_MISSING"),
        ("unknown architecture", "UNSUPPORTED_ARCHITECTURE"),
        ("shard missing", "WEIGHTS_MISSING"),
        ("truncated", "FILE_CORRUPT"),
        ("pickle only", "PICKLE_ONLY"),
        ("another model's tensors", "TENSOR_MISMATCH"),
    ],
)
def test_a_bad_folder_is_refused_and_the_running_model_stays(
    serving: Person, tmp_path: Path, how: str, code: str
) -> None:
    folder = tiny("llama", tmp_path / "model", tokenizer=True, sharded=how == "shard missing")
    spoil(folder, how)
    refused = json.loads(serving.ft("load", str(folder), "--json", code=1).stdout)
    assert refused["error"]["code"] == code
    assert refused["error"]["detail"]
    status = serving.ft_json("status")
    assert (status["state"], status["model"]) == ("ready", "demo")


def test_a_gguf_whose_counts_exceed_the_file_is_refused(serving: Person, tmp_path: Path) -> None:
    file = tmp_path / "lying.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (2**40).to_bytes(8, "little") * 2)
    refused = json.loads(serving.ft("load", str(file), "--json", code=1).stdout)
    assert refused["error"]["code"] == "FILE_CORRUPT"


@pytest.mark.parametrize("template", ["{{ raise_exception('only one question, please') }}", "endless"])
def test_a_template_that_raises_or_never_ends_refuses_the_chat_and_no_more(tmp_path: Path, template: str) -> None:
    person = Person(tmp_path / "home")
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    folder = tiny("llama", tmp_path / "model", tokenizer=True)
    for file in folder.glob("chat_template*"):
        file.unlink()
    config = folder / "tokenizer_config.json"
    text = endless if template == "endless" else template
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": text}))
    with person.daemon():
        person.ft("load", str(folder))
        model = person.ft_json("status")["model"]
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        answer = httpx.post(f"{person.url}/v1/chat/completions", json=body, timeout=30, trust_env=False)
        assert answer.status_code == 400
        assert answer.json()["error"]["freetoken_code"] == "TEMPLATE_ERROR"
        assert template == "endless" or "only one question, please" in answer.text
        plain = {"model": model, "prompt": "hello", "max_tokens": 2}
        assert httpx.post(f"{person.url}/v1/completions", json=plain, timeout=30, trust_env=False).status_code == 200


def test_bad_requests_name_their_fault(serving: Person) -> None:
    url = f"{serving.url}/v1/chat/completions"
    json_header = {"content-type": "application/json"}
    malformed = httpx.post(url, content=b'{"model": "demo", ', headers=json_header, trust_env=False)
    assert (malformed.status_code, malformed.json()["error"]["freetoken_code"]) == (400, "MALFORMED_BODY")
    empty = httpx.post(url, json={"model": "demo", "messages": []}, trust_env=False)
    assert empty.status_code == 400
    assert "messages" in empty.text
    unknown = httpx.post(url, json={"model": "gpt-4", "messages": [{"role": "user", "content": "x"}]}, trust_env=False)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert "demo" in unknown.text


def test_a_taken_port_is_named_with_its_holder(tmp_path: Path) -> None:
    someone = Person(tmp_path / "home")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = someone.ft("daemon", "start", "--port", str(port), code=2).stderr
    assert str(port) in said
    assert str(os.getpid()) in said
    shutil.rmtree(someone.home, ignore_errors=True)


def test_what_is_too_large_says_what_fits(serving: Person) -> None:
    refused = json.loads(serving.ft("load", "demo", "--num-tokens", "100000000", "--json", code=6).stdout)
    assert refused["error"]["code"] == "KV_TOO_LARGE"
    assert refused["error"]["fixes"]
    assert serving.ft_json("status")["state"] == "ready"
