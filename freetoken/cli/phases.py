"""Shows work that goes through phases: a bar on a terminal, a line a phase elsewhere, nothing with --json.

All of it goes to stderr. Does not know what the phases are.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import typer

from freetoken.core.units import Bytes, Seconds

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_EVERY_S = 10.0  # between two lines of one phase, where there is no bar


class Phases(Protocol):
    """Receives progress; `total` 0 means that the end is not known."""

    def update(self, phase: str, done: int = 0, total: int = 0, unit: str = "") -> None: ...


@contextmanager
def shown(*, quiet: bool = False) -> Iterator[Phases]:
    """The display that fits stderr, until the block ends; the last phase counts as done if it ends well."""
    if quiet:
        yield _Silent()
    elif sys.stderr.isatty():
        display = _Bars()
        with display.bar:
            yield display
            display.finish()
    else:
        lines = _Lines()
        yield lines
        lines.finish()


def amount(value: int, unit: str) -> str:
    """`value` with its unit, bytes in binary multiples."""
    return str(Bytes(value)) if unit == "bytes" else f"{value:,}{' ' + unit if unit else ''}"


class _Silent:
    def update(self, phase: str, done: int = 0, total: int = 0, unit: str = "") -> None: ...


class _Lines:
    """One line when a phase ends, and one every few seconds while it lasts."""

    def __init__(self) -> None:
        self._phase = ""
        self._began = self._said = time.monotonic()

    def update(self, phase: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        now = time.monotonic()
        if phase != self._phase:
            self.finish()
            self._phase, self._began, self._said = phase, now, now
        elif now - self._said >= LINE_EVERY_S:
            self._said = now
            far = f"{amount(done, unit)} of {amount(total, unit)}" if total > 1 else f"for {Seconds(now - self._began)}"
            typer.echo(f"  {_label(phase)}: {far}", err=True)

    def finish(self) -> None:
        if self._phase:
            typer.echo(f"  {_label(self._phase)}: done in {Seconds(time.monotonic() - self._began)}", err=True)
        self._phase = ""


class _Bars:
    """One bar a phase, the finished ones above the running one."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.bar: Bar = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description:<18}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[amount]:>24}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._phase = ""
        self._task: TaskID | None = None

    def update(self, phase: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        if phase != self._phase:
            self.finish()
            self._phase = phase
            self._task = self.bar.add_task(_label(phase), total=None, amount="")
        if self._task is not None:
            of_all = f"{amount(done, unit)} / {amount(total, unit)}" if total > 1 else ""
            self.bar.update(self._task, completed=done, total=total or None, amount=of_all)

    def finish(self) -> None:
        if self._task is not None:
            self.bar.update(self._task, total=1, completed=1)
        self._task = None


def _label(phase: str) -> str:
    return phase.replace("_", " ")
