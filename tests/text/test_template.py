"""Chat templates in their child process: the same text as transformers renders, and no way to hang or to flood."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from freetoken.core.errors import ModelNotLoaded, QueueTimeout, TemplateError
from freetoken.text.template import CHILD, TemplateLimits, TemplateSandbox

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
<|im_start|>system
Be brief.<|im_end|>
{% endif %}
    <|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
STRICT = """{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set turns = messages[1:] %}
{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}
{% for turn in turns %}
{% set asks = turn.role == 'user' %}
{% if asks != (loop.index0 % 2 == 0) %}{{ raise_exception('turns must alternate: ' ~ turn.role) }}{% endif %}
{% set lead = first ~ '\n' if loop.first and first else '' %}
{% if asks %}{{ bos_token ~ '[ASK] ' ~ lead ~ turn.content ~ ' [/ASK]' }}
{% else %}{% generation %}{{ ' ' ~ turn.content ~ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}"""
TOOLS = """{%- set ns = namespace(n=0) -%}
{%- for tool in tools or [] %}{% if tool.hidden %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}
{{ ns.n }}: {{ tool | tojson(indent=2) }}
{% endfor %}{{ messages | tojson }}{{ dict(a=1) | tojson }}"""
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TALK = [
    {"role": "user", "content": " hi <b> & 'quotes' 日本 "},
    {"role": "assistant", "content": "yes\n"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def values(**more: Any) -> dict[str, Any]:
    return {**SPECIAL, "messages": TALK, "add_generation_prompt": True, "tools": None, **more}


def run(sandbox: TemplateSandbox, source: str, **more: Any) -> str:
    return asyncio.run(sandbox.render(source, values(**more)))


@pytest.fixture
def sandbox() -> Iterator[TemplateSandbox]:
    made = TemplateSandbox(TemplateLimits(render_s=1.0, output_bytes=1 << 20, memory_bytes=256 << 20))
    yield made
    made.close()


def child_of() -> psutil.Process:
    mine = [child for child in psutil.Process().children() if str(CHILD) in child.cmdline()]
    assert len(mine) == 1
    return mine[0]


# ── what it writes ──────────────────────────────────────────────────────────────────────────────────────────────────
def theirs(source: str, messages: list[Any], **more: Any) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1})), **SPECIAL)
    return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **more)


@pytest.mark.parametrize("source", [CHATML, STRICT, TOOLS], ids=["chatml", "strict", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "S"}]], ids=["plain", "system"])
def test_renders_what_transformers_renders(
    sandbox: TemplateSandbox, source: str, prompt: bool, system: list[Any]
) -> None:
    tools = (
        [{"name": "f", "ü": [1, 2.5, None]}, {"name": "g", "hidden": True}, {"name": "h"}] if source is TOOLS else None
    )
    ours = run(sandbox, source, messages=system + TALK, add_generation_prompt=prompt, tools=tools)
    assert ours == theirs(source, system + TALK, add_generation_prompt=prompt, tools=tools)


def test_the_date_is_written(sandbox: TemplateSandbox) -> None:
    assert run(sandbox, "{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_half_surrogates_and_null_bytes_pass(sandbox: TemplateSandbox) -> None:
    assert run(sandbox, "{{ x }}", x="a\ud83d\x00\u2028b") == "a\ud83d\x00\u2028b"


# ── what it refuses ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_template_that_raises_speaks_for_itself(sandbox: TemplateSandbox) -> None:
    with pytest.raises(TemplateError) as caught:
        run(sandbox, STRICT, messages=[*TALK, TALK[0]])
    assert caught.value.detail == "turns must alternate: user"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ missing.field }}", "missing"),
        ("{{ 'a' + none }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("line one\n{% if %}", "line 2"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__|unsafe"),
        ("{{ namespace(__class__=1) }}", "underscore"),
        ("{{ lipsum() }}", "lipsum"),
        ("{{ cycler.__init__.__globals__ }}", "__init__|unsafe"),
    ],
)
def test_what_goes_wrong_inside_is_an_error_with_its_reason(
    sandbox: TemplateSandbox, source: str, message: str
) -> None:
    with pytest.raises(TemplateError, match=message):
        run(sandbox, source)


def test_an_endless_template_is_ended_and_the_next_render_works(sandbox: TemplateSandbox) -> None:
    assert run(sandbox, "ok") == "ok"
    first = child_of()
    started = time.monotonic()
    with pytest.raises(TemplateError, match="within 1 s") as caught:
        run(sandbox, ENDLESS)
    assert time.monotonic() - started < 3
    assert caught.value.numbers == {"render_s": 1.0}
    assert not first.is_running()
    assert run(sandbox, "still {{ 'here' }}") == "still here"


@pytest.mark.parametrize(
    "source", ["{{ 10 ** (10 ** 8) }}", "{% for a in range(99999) %}{% set x = 2 ** 99999 %}{% endfor %}"]
)
def test_arithmetic_without_end_is_ended(sandbox: TemplateSandbox, source: str) -> None:
    with pytest.raises(TemplateError):
        run(sandbox, source)


def test_output_is_limited(sandbox: TemplateSandbox) -> None:
    assert len(run(sandbox, "{{ 'é' * 500000 }}")) == 500_000
    for source in ("{{ 'é' * 600000 }}", "{% for a in range(9999) %}{{ 'x' * 999 }}{% endfor %}"):
        with pytest.raises(TemplateError, match="more than 1048576 bytes"):
            run(sandbox, source)
    assert run(sandbox, "{{ '\x00' * 1048576 }}") == "\x00" * 1048576  # six bytes of JSON for each


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
def test_memory_is_limited(sandbox: TemplateSandbox) -> None:
    with pytest.raises(TemplateError, match="256 MiB of memory"):
        run(sandbox, "{% set x = 'x' * 999999999 %}{{ x[0] }}")
    assert run(sandbox, "ok") == "ok"


def test_checking_compiles_only(sandbox: TemplateSandbox) -> None:
    sandbox.check("{{ raise_exception('not now') }}")
    with pytest.raises(TemplateError, match="line 1"):
        sandbox.check("{% for %}")


# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────────────
def test_renders_take_turns_in_one_process(sandbox: TemplateSandbox) -> None:
    async def many() -> list[str]:
        return list(await asyncio.gather(*(sandbox.render("{{ n }}", {"n": n}) for n in range(40))))

    assert asyncio.run(many()) == [str(n) for n in range(40)]
    child_of()


def test_the_event_loop_goes_on_while_a_template_runs(sandbox: TemplateSandbox) -> None:
    async def beats() -> int:
        render = asyncio.create_task(sandbox.render(ENDLESS, {}))
        count = 0
        while not render.done():
            await asyncio.sleep(0.01)
            count += 1
        assert isinstance(render.exception(), TemplateError)
        return count

    assert asyncio.run(beats()) > 20


def test_waiting_for_others_has_an_end() -> None:
    sandbox = TemplateSandbox(TemplateLimits(render_s=4.0, wait_s=0.3))
    sandbox.check("started")

    async def crowd() -> list[Any]:
        return await asyncio.gather(*(sandbox.render(ENDLESS, {}) for _ in range(3)), return_exceptions=True)

    started = time.monotonic()
    ended = asyncio.run(crowd())
    assert [type(error) for error in ended] == [QueueTimeout] * 3
    assert time.monotonic() - started < 2.0
    sandbox.close()


def test_a_killed_child_is_replaced(sandbox: TemplateSandbox) -> None:
    assert run(sandbox, "one") == "one"
    child_of().kill()
    time.sleep(0.1)
    assert run(sandbox, "two") == "two"


def test_a_child_that_dies_in_the_middle_is_reported(sandbox: TemplateSandbox) -> None:
    async def main() -> None:
        await sandbox.render("warm", {})
        render = asyncio.create_task(sandbox.render(ENDLESS, {}))
        await asyncio.sleep(0.2)
        child_of().kill()
        await render

    with pytest.raises(TemplateError, match="ended with status"):
        asyncio.run(main())


def test_closing_ends_the_child_and_renders_under_way() -> None:
    sandbox = TemplateSandbox()

    async def main() -> float:
        await sandbox.render("warm", {})
        child = child_of()
        waiting = [asyncio.create_task(sandbox.render(source, {})) for source in (ENDLESS, "next")]
        await asyncio.sleep(0.2)
        started = time.monotonic()
        sandbox.close()
        sandbox.close()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(error) for error in ended] == [ModelNotLoaded, ModelNotLoaded]
        with pytest.raises(ModelNotLoaded):
            await sandbox.render("late", {})
        child.wait(timeout=5)
        return time.monotonic() - started

    assert asyncio.run(main()) < 1


def test_the_child_ends_with_its_parent() -> None:
    """Idle by the end of its stdin; in the middle of a template by its own watchdog."""
    command = [sys.executable, "-P", str(CHILD), str(256 << 20)]
    idle = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert idle.stdin and idle.stdout
    idle.stdin.close()
    assert idle.wait(timeout=10) == 0
    idle.stdout.close()

    busy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert busy.stdin and busy.stdout
    busy.stdin.write(b'{"template": "%s", "values": {}, "output_bytes": 9, "seconds": 0}\n' % ENDLESS.encode())
    busy.stdin.close()
    assert busy.wait(timeout=10) != 0
    busy.stdout.close()
