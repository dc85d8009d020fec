"""The API over the real text layer: a tokenizer trained here, and chat templates that work, refuse and never end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from freetoken.catalog.checkpoint import TextSource
from freetoken.core.events import Tokens
from freetoken.core.types import FinishReason, TokenLogprob
from freetoken.text.codec import TextCodec
from freetoken.text.template import TemplateLimits
from freetoken.text.tokenizer import load_text
from tests.api.conftest import Service

ANSWER = "Paris — 巴黎, パリ 🗼 — is the capital.\n\nReally, it is."
TEMPLATE = """
{%- for message in messages -%}
{%- if message.content == "refuse" -%}{{ raise_exception("No such turn") }}{%- endif -%}
{%- if message.content == "loop" -%}{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}{%- endif -%}
<|start|>{{ message.role }}: {{ message.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant: {% endif -%}
"""  # noqa: E501


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextCodec]:
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([ANSWER] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    codec = TextCodec(load_text(TextSource("hf", folder)), TemplateLimits(render_s=0.5))
    yield codec
    codec.close()


@pytest.fixture
def speaking(service: Service, codec: TextCodec) -> Service:
    """The service over the real codec, with a backend that says ANSWER, a token at a time, and then `<|end|>`."""
    service.host.__init__(service.backend, text=codec, eos_ids=(1,))  # type: ignore[misc]
    ids = codec.encode(ANSWER)
    service.backend.script = lambda request: [*(Tokens((i,)) for i in ids), Tokens((1,), finish=FinishReason.STOP)]
    return service


def ask(client: openai.OpenAI, content, **fields):
    return client.chat.completions.create(
        model="org/tiny", messages=[{"role": "user", "content": content}], timeout=10, **fields
    )


def test_prompt_and_answer_go_through_the_models_own_text(
    speaking: Service, client: openai.OpenAI, codec: TextCodec
) -> None:
    parts = [{"type": "text", "text": "Where?"}]
    assert ask(client, parts).choices[0].message.content == ANSWER  # without <|end|>
    prompt = "<|start|>user: Where?<|end|><|start|>assistant: "
    assert list(speaking.backend.requests[0].token_ids) == codec.encode_chat(prompt)
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, "Where?", stream=True)]
    assert "".join(pieces) == ANSWER and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["パリ", "🗼", ".\n\n", "capital"])
def test_stop_strings_inside_and_across_tokens(speaking: Service, client: openai.OpenAI, stop: str) -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, "Where?", stream=True, stop=stop)]
    assert "".join(pieces) == ANSWER[: ANSWER.index(stop)]


def test_logprobs_spell_the_answer(speaking: Service, client: openai.OpenAI, codec: TextCodec) -> None:
    said = [Tokens((i,), (TokenLogprob(i, -1.0),)) for i in codec.encode(ANSWER)]
    end = Tokens((1,), (TokenLogprob(1, -1.0),), finish=FinishReason.STOP)
    speaking.backend.script = lambda request: [*said, end]
    choice = ask(client, "Where?", logprobs=True).choices[0]
    assert b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode() == ANSWER
    assert choice.message.content == ANSWER


@pytest.mark.parametrize(("content", "says"), [("refuse", "No such turn"), ("loop", "0.5")])
@pytest.mark.parametrize("stream", [False, True])
def test_templates_that_refuse_or_never_end(
    speaking: Service, client: openai.OpenAI, content: str, says: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        ask(client, content, stream=stream)
    assert caught.value.body["freetoken_code"] == "TEMPLATE_ERROR" and speaking.backend.requests == []
    assert ask(client, "Where?").choices[0].message.content == ANSWER


def test_an_image_is_refused_by_name(speaking: Service, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="image_url") as caught:
        ask(client, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])
    assert caught.value.body["freetoken_code"] == "UNSUPPORTED_CONTENT"
