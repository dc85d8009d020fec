"""`ft plan`: does it fit, and what would it take? Needs no daemon, no GPU and no weights.

A model is planned for this machine, or for the one that --vram and --ram describe.
"""

from __future__ import annotations

from typing import Annotated

import typer

from freetoken.cli import output
from freetoken.cli.flags import Flags, with_knobs
from freetoken.cli.session import model_argument
from freetoken.core.errors import PlanError, SettingError
from freetoken.core.units import Bytes
from freetoken.settings.load import load as load_settings


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("plan", help="Say what a model would need and whether it fits, without loading it.")(plan)


@with_knobs("load")
def plan(
    model: Annotated[str, typer.Argument(help="A model id, a folder, a .gguf file, or a folder with config.json.")],
    flags: Flags,
    vram: Annotated[
        str | None, typer.Option("--vram", help="Plan for a GPU with this much free.", metavar="SIZE")
    ] = None,
    ram: Annotated[str | None, typer.Option("--ram", help="Plan for this much free memory.", metavar="SIZE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
) -> None:
    from freetoken.daemon.forecast import forecast
    from freetoken.daemon.shelf import Shelf
    from freetoken.plan.report import lines, to_json

    loaded = load_settings(flags)
    row = Shelf(loaded.settings.home / "models").locate(model_argument(model))
    found = forecast(row.path, loaded.load_options(), _size("--vram", vram), _size("--ram", ram))
    if as_json:
        output.emit(to_json(found))
    else:
        for line in lines(found, f"ft load {model}"):
            output.say(line)
    if found.resolved is None:
        raise typer.Exit(PlanError.exit_code)


def _size(flag: str, text: str | None) -> Bytes | None:
    if text is None:
        return None
    try:
        return Bytes.parse(text)
    except ValueError as fault:
        raise SettingError(f"{flag}: {fault}", param=flag) from None
