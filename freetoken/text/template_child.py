"""The process in which chat templates run: `python template_child.py MEMORY_BYTES`. JSON lines in, JSON lines out.

A template is code from a downloaded file. Here it meets an immutable Jinja sandbox, a limit on memory (where the system
has one) and on output; the parent (template.py) kills the process at its deadline. Every request carries all it needs:

    {"template": source, "values": {...} or null to compile only, "output_bytes": n, "seconds": s}
    {"text": rendered}  or  {"fault": "template" | "output" | "memory", "detail": sentence}

The process ends with its stdin, and, should the parent be gone while a template runs, by itself after the deadline.
Imports nothing of this project, so that it starts fast and from any folder. The environment offers what templates were
written against, after transformers' documentation: trim_blocks, lstrip_blocks, loop controls, tojson without HTML
escapes, raise_exception, strftime_now, and `generation` blocks as plain text.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

ORPHAN_GRACE_S = 2.0  # the parent's kill comes first while there is a parent


class GenerationBlocks(Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class PlainNamespace(Namespace):
    """A namespace without underscore names: those would be Python's own attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name}")


def raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "namespace": PlainNamespace,
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
    }
    del made.globals["lipsum"]
    return made


ENVIRONMENT = environment()


@lru_cache(maxsize=8)
def compiled(source: str) -> Template:
    return ENVIRONMENT.from_string(source)


class OutputTooLarge(Exception):
    pass


def render(template: Template, values: dict[str, Any], limit: int) -> str:
    """The rendered text, at most `limit` bytes of UTF-8. Raises OutputTooLarge as soon as it is longer."""
    parts, length = [], 0
    for part in template.generate(**values):
        length += len(part.encode("utf-8", "surrogatepass"))
        if length > limit:
            raise OutputTooLarge
        parts.append(part)
    return "".join(parts)


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        template = compiled(request["template"])
        values = request["values"]
        return {"text": "" if values is None else render(template, values, request["output_bytes"])}
    except TemplateSyntaxError as error:
        return {"fault": "template", "detail": f"line {error.lineno}: {error.message}"}
    except TemplateError as error:
        return {"fault": "template", "detail": error.message or type(error).__name__}
    except OutputTooLarge:
        return {"fault": "output", "detail": ""}
    except MemoryError:
        return {"fault": "memory", "detail": ""}
    except Exception as error:  # noqa: BLE001  a template can raise anything; it is reported, that is the answer
        return {"fault": "template", "detail": f"{type(error).__name__}: {error}"}


def limit_memory(limit: int) -> None:
    """Hold the address space of this process to `limit` bytes, where the system can."""
    try:
        import resource
    except ImportError:  # Windows
        return
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (OSError, ValueError):  # systems that know the limit but do not take it (macOS): time and output still hold
        return


def main() -> None:
    limit_memory(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the daemon's terminal is for the daemon
    with open(os.devnull, "w") as nowhere:
        for line in sys.stdin.buffer:
            request = json.loads(line)
            faulthandler.dump_traceback_later(request["seconds"] + ORPHAN_GRACE_S, file=nowhere, exit=True)
            reply = json.dumps(answer(request))
            sys.stdout.buffer.write(reply.encode() + b"\n")
            sys.stdout.buffer.flush()
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
