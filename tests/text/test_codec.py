"""The codec as the API uses it: load, encode, render, stream; and what importing it costs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from freetoken.catalog.checkpoint import TextSource
from freetoken.core.errors import TemplateError, TokenizerMissing, UnsupportedContent
from freetoken.text.codec import TextCodec

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<quiet>' if enable_thinking is false }}{% endif %}"
)


def load(path: Path, tokenizer: Tokenizer, **config: Any) -> TextCodec:
    with_bos = Tokenizer.from_str(tokenizer.to_str())
    with_bos.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    with_bos.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>"} | config
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return TextCodec.load(TextSource("hf", path))


@pytest.fixture
def codec(byte_level: Tokenizer, tmp_path: Path) -> Iterator[TextCodec]:
    made = load(tmp_path, byte_level, chat_template=TEMPLATE)
    yield made
    made.close()


def render(codec: TextCodec, messages: list[dict[str, Any]], **more: Any) -> str:
    return asyncio.run(codec.render(messages, **more))


def test_a_chat_makes_a_round(codec: TextCodec, byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the quick"}, {"role": "developer", "content": "Be brief"}]
    rendered = render(codec, messages)
    assert rendered == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nthe quick<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = codec.encode_chat(rendered)
    assert ids == byte_level.encode(rendered, add_special_tokens=False).ids
    stream = codec.detokenizer()
    shown = "".join(stream.push([i]) for i in ids) + stream.flush()
    assert shown == rendered.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_options_reach_the_template(codec: TextCodec) -> None:
    user = [{"role": "user", "content": "u"}]
    assert render(codec, user, enable_thinking=False).endswith("<quiet>")
    assert render(codec, user, add_generation_prompt=False).endswith("<|im_end|>\n")
    assert '{"name": "é"}' in render(codec, user, tools=[{"name": "é"}])
    with pytest.raises(UnsupportedContent):
        render(codec, [{"role": "user", "content": [{"type": "image_url"}]}])


def test_plain_text_gets_bos_and_may_be_taken_literally(codec: TextCodec, byte_level: Tokenizer) -> None:
    bos, end = byte_level.token_to_id("<s>"), byte_level.token_to_id("<|im_end|>")
    assert codec.encode("the<|im_end|>")[0] == bos
    assert codec.encode("the<|im_end|>")[-1] == end
    literal = codec.encode("the<|im_end|>", special=False)
    assert bos not in literal and end not in literal
    assert codec.detokenizer().push(literal) == "the<|im_end|>"
    assert codec.encode_chat("the<|im_end|>")[-1] == end  # the setting does not stay


def test_threads_do_not_mix_the_settings(codec: TextCodec) -> None:
    plain, literal = codec.encode("a<|im_end|>"), codec.encode("a<|im_end|>", special=False)
    wrong: list[list[int]] = []

    def work(special: bool, expected: list[int]) -> None:
        wrong.extend(ids for _ in range(300) if (ids := codec.encode("a<|im_end|>", special=special)) != expected)

    threads = [threading.Thread(target=work, args=args) for args in ((True, plain), (False, literal)) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []


def test_facts_and_single_tokens(codec: TextCodec, byte_level: Tokenizer) -> None:
    assert codec.vocab_size == byte_level.get_vocab_size()
    assert codec.has_template and codec.template_fault is None
    assert byte_level.token_to_id("<|im_end|>") in codec.special_ids
    assert byte_level.token_to_id("<think step>") not in codec.special_ids
    robot = codec.encode("🤖", special=False)
    assert b"".join(map(codec.token_bytes, robot)).decode() == "🤖"
    assert codec.token_text(robot[0]) == "\ufffd"
    assert codec.token_text(byte_level.token_to_id("<|im_end|>")) == "<|im_end|>"


def test_halves_of_emoji_are_replaced_not_fatal(codec: TextCodec) -> None:
    assert codec.encode("a\ud83d") == codec.encode("a\ufffd")
    rendered = render(codec, [{"role": "user", "content": "cut \ud83d"}])
    assert codec.encode_chat(rendered) == codec.encode_chat(rendered.replace("\ud83d", "\ufffd"))


@pytest.mark.parametrize("special", [True, False])
def test_without_a_template_completions_work_and_chats_say_why(
    byte_level: Tokenizer, tmp_path: Path, special: bool
) -> None:
    codec = load(tmp_path, byte_level)
    assert not codec.has_template
    assert codec.encode("the", special=special)
    with pytest.raises(TemplateError, match="no default chat template"):
        render(codec, [{"role": "user", "content": "u"}])
    codec.close()


def test_a_template_that_does_not_compile_leaves_completions(byte_level: Tokenizer, tmp_path: Path) -> None:
    codec = load(tmp_path, byte_level, chat_template="a\n{% endfor %}")
    assert codec.template_fault is not None and "line 2" in codec.template_fault
    assert codec.encode("the")
    with pytest.raises(TemplateError, match="line 2"):
        render(codec, [{"role": "user", "content": "u"}])
    codec.close()


def test_the_tool_template_is_taken_with_tools(byte_level: Tokenizer, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    codec = load(tmp_path, byte_level, chat_template=named)
    user = [{"role": "user", "content": "u"}]
    assert (render(codec, user), render(codec, user, tools=[{}]), render(codec, user, tools=[])) == (
        "plain",
        "tools",
        "plain",
    )
    codec.close()


def test_no_tokenizer_is_an_error_of_the_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerMissing):
        TextCodec.load(TextSource("hf", tmp_path))


def test_importing_brings_no_tokenizer_and_no_template_engine() -> None:
    probe = (
        "import sys, freetoken.text.codec; print([m for m in ('tokenizers', 'jinja2', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
