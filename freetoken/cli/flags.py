"""Command line flags made from the settings schema, so that a knob has one name, one help text and one parser.

Values stay raw text here; settings.load gives them their types and names the flag in its errors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import typer

from freetoken.settings.schema import KNOBS, Knob, Scope

Flags = Mapping[str, object]  # setting name -> text, or a bool for a switch; None where the flag is absent


def knobs(*scopes: Scope) -> tuple[Knob, ...]:
    """The settings of these scopes that have a flag, in the schema's order."""
    return tuple(knob for knob in KNOBS.values() if knob.flag and knob.scope in scopes)


def with_knobs(*scopes: Scope) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a verb that takes `flags: Flags` as its last argument: it gets an option for each knob instead."""
    chosen = knobs(*scopes)

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def command(**given: Any) -> None:
            flags = {knob.name: given.pop(knob.name) for knob in chosen}
            verb(**given, flags=flags)

        own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.name != "flags"]
        parameters = own + [_parameter(knob) for knob in chosen]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameter(knob: Knob) -> inspect.Parameter:
    switch = knob.kind == "switch"
    default = typer.Option(
        False if switch else None,
        knob.flag or "",
        help=_help(knob),
        metavar=None if switch else (knob.unit or knob.kind).upper(),
        show_default=False,
    )
    kind = bool if switch else str | None
    return inspect.Parameter(knob.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _help(knob: Knob) -> str:
    choices = f" One of: {', '.join(knob.choices)}." if knob.choices else ""
    default = f" [{knob.default}]" if knob.default not in (None, False, ()) else ""
    return f"{knob.help}{choices}{default}"
