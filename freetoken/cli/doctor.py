"""`ft doctor`: what is wrong with this machine, this installation or the state folder, and what to do about it.

Works without a daemon. Does not look at anything itself (daemon/doctor does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from freetoken.cli import output
from freetoken.settings.load import load

if TYPE_CHECKING:
    from freetoken.daemon.doctor.examine import Report
    from freetoken.daemon.doctor.verdict import Result

COLOURS = {"fail": "red", "warn": "yellow", "inconclusive": "magenta", "pass": "green", "skipped": "bright_black"}


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("doctor", help="Look for what is wrong here, and say what to do. Exit code 1 if a check fails.")(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="First make the safe repairs, and say which.")] = False,
) -> None:
    from freetoken.daemon.doctor.examine import examine
    from freetoken.daemon.doctor.repair import repair
    from freetoken.daemon.store import Home

    settings = load().settings
    fixed = repair(Home(settings.home)) if fix else []
    report = examine(settings)
    if as_json:
        checks = [result.to_json() for result in report.results]
        output.emit({"checks": checks, "summary": report.summary, "fixed": fixed})
    else:
        _print(report, fixed)
    if not report.healthy:
        raise typer.Exit(1)


def _print(report: Report, fixed: list[str]) -> None:
    """Failures first, each with its remedies; what is in order afterwards, a line each."""
    for done in fixed:
        output.say(f"fixed: {output.printable(done)}")
    order = list(COLOURS)
    width = max(len(result.title) for result in report.results)
    for result in sorted(report.results, key=lambda result: order.index(result.status)):
        _line(result, width)
    output.say(", ".join(f"{count} {status}" for status, count in report.summary.items() if count))


def _line(result: Result, width: int) -> None:
    column = max(map(len, COLOURS))
    typer.secho(f"{result.status:<{column}}", nl=False, fg=COLOURS[result.status], bold=result.status == "fail")
    output.say(f"  {result.title:<{width}}  {output.printable(result.detail)}")
    for fix in result.fixes:
        output.say(f"{'':<{column + width + 4}}fix: {output.printable(fix)}")
