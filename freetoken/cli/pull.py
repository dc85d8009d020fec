"""`ft pull`: gets a model onto this machine; so far the demo."""

from __future__ import annotations

from typing import Annotated

import typer

from freetoken.cli import output, phases
from freetoken.core.errors import ModelNotFound
from freetoken.settings.load import home as state_folder


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("pull", help="Get a model. `ft pull demo` fetches 93 MB and makes a small Mixture of Experts.")(pull)


def pull(
    model: Annotated[str, typer.Argument(help="What to get: demo.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    from freetoken.cli.demo import REAL_TOOLS, Source, pull_demo
    from freetoken.daemon.store import open_home

    if model != "demo":
        fixes = ("ft pull demo", "ft load FOLDER for a model that is on this disk")
        raise ModelNotFound(f"only the demo can be pulled, not {model!r}", fixes=fixes)
    with phases.shown(quiet=as_json) as display:
        folder, made = pull_demo(open_home(state_folder()), display.update, Source(), REAL_TOOLS)
    if as_json:
        output.emit({"model": "demo", "folder": str(folder), "pulled": made})
    else:
        output.say(f"demo is ready: {folder}" if made else f"demo is already there: {folder}")
