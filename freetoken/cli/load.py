"""`ft load` and `ft unload`: ask the daemon and show the work until it is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from freetoken.cli import output, phases
from freetoken.cli.flags import Flags, with_knobs
from freetoken.cli.session import connect, model_argument
from freetoken.settings.load import load as load_settings

if TYPE_CHECKING:
    from freetoken.client.control import ControlClient
    from freetoken.client.views import Operation

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
    app.command("load", help="Load a model and wait until it answers. Ctrl-C cancels the load.")(load)
    app.command("unload", help="End the engine and free its memory.")(unload)


@with_knobs("load")
def load(
    model: Annotated[str, typer.Argument(help="A model id (`demo`, `org/name`), or a folder or .gguf file.")],
    flags: Flags,
    as_json: Json = False,
) -> None:
    options = load_settings(flags).load_options()
    with connect() as client:
        loaded = load_and_follow(client, model_argument(model), options, quiet=as_json)
    if as_json:
        output.emit({"model": loaded["model"], "state": loaded["state"]})
    else:
        output.say(f"{loaded['model']} is loaded and answers at {client.address.url}/v1")


def unload(as_json: Json = False) -> None:
    with connect() as client:
        operation = client.unload()
        if operation is not None:
            follow(client, operation, quiet=as_json)
    if as_json:
        output.emit({"state": "stopped"})
    else:
        output.say("no model was loaded" if operation is None else "the engine has ended")


def load_and_follow(
    client: ControlClient, model: str, options: Mapping[str, object], *, quiet: bool
) -> dict[str, object]:
    """Load `model`, showing the phases; GET /engine afterwards. Raises what the load failed with."""
    operation = client.load(model, options)
    if operation is not None:
        follow(client, operation, quiet=quiet)
    return client.engine()


def follow(client: ControlClient, operation: Operation, *, quiet: bool) -> None:
    """Show an operation until it is done. An interrupt cancels it and goes on as one."""
    try:
        with phases.shown(quiet=quiet) as display:
            for seen in client.follow(operation.id):
                if seen.phase and not seen.done:
                    progress = seen.progress
                    facts = (progress.done, progress.total, progress.unit) if progress else (0, 0, "")
                    display.update(seen.phase, *facts)
    except KeyboardInterrupt:
        client.cancel(operation.id)
        raise
