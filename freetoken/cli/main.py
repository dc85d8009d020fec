"""The `ft` command: THE table of verbs, and errors turned into exit codes.

A verb's module is imported only when it is asked for, and typer not even for `ft --version`: a command line that
answers at once is pleasant, and the desktop app probes with it. Exit codes: 0 ok, 1 failure, 2 usage, 3 daemon not
reachable, 4 auth, 5 refused by a guardrail, 6 does not fit, 7 engine failed, 8 timeout, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from freetoken import __version__
from freetoken.core.errors import FreeTokenError

if TYPE_CHECKING:
    import typer

# verb -> its module in this package; each has `register(app)`. The order is that of `ft --help`.
VERBS = {
    "serve": "serve",
    "daemon": "daemon",
    "plan": "plan",
    "load": "load",
    "unload": "load",
    "status": "status",
    "chat": "chat",
    "pull": "pull",
    "doctor": "doctor",
}


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main(sys.argv[1:]))


def main(args: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    if list(args) in (["--version"], ["-V"]):
        print(f"FreeToken {__version__}")
        return 0
    try:
        build(args)(args=list(args) or ["--help"], prog_name="ft")
    except FreeTokenError as error:
        from freetoken.cli.output import complain

        complain(error, as_json="--json" in args)
        return error.exit_code
    except SystemExit as end:  # typer's own end: usage errors, --help, Ctrl-C
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def build(args: Sequence[str]) -> typer.Typer:
    """The application with the verb that `args` begin with, or with all of them where that is not one."""
    import typer

    app = typer.Typer(
        help="FreeToken: large Mixture-of-Experts models on this machine.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    @app.callback()
    def ft(version: bool = typer.Option(False, "--version", "-V", help="Print the version and exit.")) -> None:
        if version:
            typer.echo(f"FreeToken {__version__}")
            raise typer.Exit

    asked = VERBS.get(args[0]) if args else None
    for module in [asked] if asked else dict.fromkeys(VERBS.values()):
        import_module(f"freetoken.cli.{module}").register(app)
    return app
