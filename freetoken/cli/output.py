"""What a person or a script reads: aligned rows, one JSON object, an error with its remedies.

Answers go to stdout, everything said about them to stderr, so that a pipe gets the answer alone. Colour only on a
terminal (typer drops it elsewhere). Does not know what the numbers mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping

import typer

from freetoken.core.errors import FreeTokenError


def emit(value: object) -> None:
    """One JSON value on one line of stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def say(text: str) -> None:
    """A line for stdout."""
    typer.echo(text)


def note(text: str) -> None:
    """A line about the work, on stderr."""
    typer.secho(text, err=True, dim=True)


def rows(pairs: Iterable[tuple[str, str]]) -> None:
    """`name  value` lines with the values under each other."""
    table = list(pairs)
    width = max((len(name) for name, _ in table), default=0)
    for name, value in table:
        typer.echo(f"{name:<{width}}  {value}")


def show(value: Mapping[str, object], pairs: Iterable[tuple[str, str]], *, as_json: bool) -> None:
    """`value` for scripts or `pairs` for people."""
    if as_json:
        emit(value)
    else:
        rows(pairs)


def complain(error: FreeTokenError, *, as_json: bool) -> None:
    """`error: detail` and a `fix:` line for each remedy on stderr; with --json one object on stdout."""
    if as_json:
        emit({"error": {"code": error.code, "detail": error.detail, "fixes": list(error.fixes)}})
        return
    sys.stdout.flush()
    typer.secho("error: ", err=True, nl=False, fg="red", bold=True)
    typer.echo(printable(error.detail), err=True)
    for fix in error.fixes:
        typer.echo(f"  fix: {printable(fix)}", err=True)


def printable(text: str) -> str:
    """`text` on one line, with control characters escaped: a message may quote what a file or a server says."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text.strip())
