"""`ft daemon start|stop|status`: the background process, begun detached and ended only when it is really gone."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from freetoken import __version__
from freetoken.cli import output
from freetoken.cli.flags import Flags, knobs, with_knobs
from freetoken.core.errors import DaemonError, DaemonNotReachable, DeadlineExceeded, UsageError
from freetoken.settings.load import home as state_folder

if TYPE_CHECKING:
    from freetoken.client.discovery import Address

START_S = 60.0  # to the first answer: a cold disk, or an older daemon that must leave first
STOP_S = 60.0  # the engine gets its own deadline inside
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add `daemon` and its verbs to `app`."""
    group = typer.Typer(help="Start, stop and see the background process.", no_args_is_help=True, rich_markup_mode=None)
    group.command("start", help="Start it in the background, if it does not run yet.")(start)
    group.command("stop", help="Stop it and its engine; returns when the port is free.")(stop)
    group.command("status", help="Whether it runs, and where. Exit code 3 if it does not.")(status)
    app.add_typer(group, name="daemon")


@with_knobs("daemon")
def start(flags: Flags, as_json: Json = False) -> None:
    found = running()
    begin = found is None or found.version != __version__  # the new one asks an older one to leave
    if found is None or begin:
        found = spawn(daemon_arguments(flags), before=found, as_json=as_json)
    else:
        refuse_late(flags, found.url)
    if as_json:
        output.emit({**_facts(found), "started": begin})
    else:
        output.say(f"the daemon {'started' if begin else 'already runs'} at {found.url} (pid {found.pid})")


def stop(as_json: Json = False) -> None:
    from freetoken.client.control import ControlClient

    found = running()
    if found is not None:
        with ControlClient(found) as client:
            client.shutdown()
        wait_gone(found)
    if as_json:
        output.emit({"running": False, "stopped": found is not None})
    else:
        output.say("no daemon runs" if found is None else f"the daemon has ended (it was at {found.url})")


def status(as_json: Json = False) -> None:
    found = running()
    if found is None:
        output.show({"running": False}, [("daemon", "not running")], as_json=as_json)
        raise typer.Exit(DaemonNotReachable.exit_code)
    minutes = (time.time() - found.start_time) / 60
    lines = [("daemon", "running"), ("url", found.url), ("pid", str(found.pid)), ("up", f"{minutes:.1f} min")]
    output.show({"running": True, **_facts(found)}, lines, as_json=as_json)


def running() -> Address | None:
    """The daemon of this state folder that answers, or None."""
    from freetoken.client.control import ControlClient
    from freetoken.client.discovery import find

    try:
        address = find(state_folder())
        with ControlClient(address) as client:
            client.live()
    except DaemonNotReachable:
        return None
    return address


def daemon_arguments(flags: Flags) -> list[str]:
    """The daemon's own flags among `flags`, as its command line takes them."""
    arguments: list[str] = []
    for knob in knobs("daemon"):
        value = flags.get(knob.name)
        if value not in (None, False):
            arguments += [str(knob.flag)] if value is True else [str(knob.flag), str(value)]
    return arguments


def refuse_late(flags: Flags, url: str) -> None:
    """UsageError for daemon flags that the daemon at `url`, which runs already, cannot take any more."""
    late = [str(knob.flag) for knob in knobs("daemon") if flags.get(knob.name) not in (None, False)]
    if flags.get("port") == str(urlsplit(url).port):
        late.remove("--port")
    if late:
        raise UsageError(
            f"a daemon already runs at {url}: {', '.join(late)} would not take effect",
            fixes=("ft daemon stop, then this command again", f"leave out {' '.join(late)}"),
        )


def spawn(arguments: list[str], *, before: Address | None, as_json: bool) -> Address:
    """A new daemon that outlives this process, other than `before`; what it says meanwhile is passed on.

    Ends with the daemon's own words and exit code (typer.Exit) when it ends instead of answering.
    """
    with tempfile.TemporaryFile() as said:  # the daemon keeps its own log; this holds what it says before it has one
        child = subprocess.Popen(
            command(arguments), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, **detached()
        )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            ended = child.poll()
            found = running()
            if found is not None and (before is None or found.instance_id != before.instance_id):
                _relay(said, as_json=as_json)
                return found
            if ended is not None:
                raise relayed_end(ended, _text(said), as_json=as_json)
            time.sleep(0.05)
    raise DeadlineExceeded(
        f"the daemon (pid {child.pid}) did not answer within {START_S:.0f} s", fixes=("ft daemon status",)
    )


def command(arguments: list[str]) -> list[str]:
    """How the daemon is started: this interpreter, absolute, and its module."""
    return [sys.executable, "-m", "freetoken.daemon.main", *arguments]


def relayed_end(code: int, said: str, *, as_json: bool) -> typer.Exit:
    """Repeats the last words of a daemon that ended at its start; what to raise to end with its exit code."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    detail = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    fixes = tuple(line.removeprefix("fix: ") for line in lines if line.startswith("fix: "))
    last = lines[-1] if lines else "it said nothing"
    error = DaemonError(detail or f"the daemon ended at its start (exit code {code}): {last}", fixes=fixes)
    output.complain(error, as_json=as_json)
    return typer.Exit(code if code > 0 else DaemonError.exit_code)


def wait_gone(address: Address) -> None:
    """Return when the process has ended and its port refuses. DeadlineExceeded with what is still there."""
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        if not address.running() and not _listens(address.url):
            return
        time.sleep(0.05)
    what = f"process {address.pid} still runs" if address.running() else f"something still listens at {address.url}"
    raise DeadlineExceeded(f"{what} {STOP_S:.0f} s after it was asked to end", fixes=(f"kill {address.pid}",))


def _relay(said: IO[bytes], *, as_json: bool) -> None:
    """Show what a good daemon had to say, such as that it took another port; where it listens is said anyway."""
    for line in _text(said).splitlines():
        if not as_json and not line.startswith("listening at "):
            output.note(line)


def _text(said: IO[bytes]) -> str:
    said.seek(0)
    return said.read().decode("utf-8", "replace")


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80), timeout=1.0).close()
    except OSError:
        return False
    return True


def _facts(address: Address) -> dict[str, Any]:
    return {"url": address.url, "pid": address.pid, "instance_id": address.instance_id}


def detached() -> dict[str, Any]:
    """Popen options that cut the child from this terminal and its Ctrl-C."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP}
    return {"start_new_session": True}
