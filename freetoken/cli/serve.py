"""`ft serve`: the daemon in the foreground, with a load already asked for.

The daemon is a child in owned mode: it says where it listens in one line and ends when this process does, however
that happens. Where one of this version runs already, that line says so; the load is handed to it, and leaving this
command leaves it alone.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from freetoken.cli import output
from freetoken.cli.daemon import START_S, STOP_S, command, daemon_arguments, detached, refuse_late
from freetoken.cli.flags import Flags, with_knobs
from freetoken.cli.foreign import refuse_unknown
from freetoken.cli.load import load_and_follow
from freetoken.cli.session import connect, model_argument
from freetoken.core.errors import DaemonError, DaemonNotReachable, DeadlineExceeded, EngineError, UsageError
from freetoken.settings.load import Loaded, load

TERMINATED = 143  # 128 + SIGTERM, as shells count


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(
        "serve",
        help="Run the daemon in the foreground and load a model. Ctrl-C ends both.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(serve)


@with_knobs("start", "daemon", "load")
def serve(
    context: typer.Context,
    flags: Flags,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    refuse_unknown(context.args)
    loaded = load(flags)
    model = _model(loaded)
    signal.signal(signal.SIGTERM, _terminate)
    with owned_daemon(daemon_arguments(flags)) as daemon:
        if daemon.attached:
            refuse_late(flags, daemon.url)
            output.note(f"a daemon already runs at {daemon.url}: it takes the load, and stays when this command ends")
        run(daemon, model, loaded, as_json=as_json)


class OwnedDaemon:
    """The child process and what its first line said."""

    def __init__(self, child: subprocess.Popen[bytes], handshake: dict[str, Any]) -> None:
        self.child = child
        self.url: str = handshake["url"]
        self.attached: bool = handshake.get("attached", False)


def run(daemon: OwnedDaemon, model: str | None, loaded: Loaded, *, as_json: bool) -> None:
    """Load, say where it answers, then repeat what happens to the engine until the daemon or the user ends it."""
    with connect() as client:
        if as_json:
            output.emit({"event": "listening", "url": daemon.url, "attached": daemon.attached})
        if model is not None:
            load_and_follow(client, model, loaded.load_options(), quiet=as_json)
        if as_json:
            output.emit({"event": "ready", "url": daemon.url, "model": client.engine().get("model")})
        else:
            output.say(_welcome(daemon.url, model))
        try:
            for event in client.events():
                if event.type in ("engine.state_changed", "engine.crashed"):
                    _tell(event.type, event.data or {}, as_json=as_json)
        except DaemonNotReachable:
            if daemon.attached:
                raise
    code = daemon.child.wait(STOP_S)
    if code:
        raise EngineError(f"the daemon ended with exit code {code}", fixes=("look into logs/daemon.log",))


@contextmanager
def owned_daemon(arguments: list[str]) -> Iterator[OwnedDaemon]:
    """The daemon as a child; ended when the block ends. typer.Exit with its exit code if it does not start."""
    child = subprocess.Popen(
        command(["--owned", *arguments]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, **detached()
    )
    try:
        yield OwnedDaemon(child, _handshake(child))
    finally:
        _end(child)


def _handshake(child: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The child's first line. It has said on stderr, which is ours too, why there is none."""
    lines: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_read_first, args=(child, lines), name="handshake", daemon=True).start()
    try:
        line = lines.get(timeout=START_S)
    except queue.Empty:
        raise DeadlineExceeded(f"the daemon did not say where it listens within {START_S:.0f} s") from None
    if not line:
        raise typer.Exit(child.wait(STOP_S) or DaemonError.exit_code)
    found: dict[str, Any] = json.loads(line)
    return found


def _read_first(child: subprocess.Popen[bytes], lines: queue.Queue[bytes]) -> None:
    if child.stdout is not None:
        lines.put(child.stdout.readline())
        while child.stdout.read(1 << 16):  # nothing more is expected; a full pipe would stop the daemon
            pass


def _end(child: subprocess.Popen[bytes]) -> None:
    """Close the child's stdin, which ends an owned daemon; kill it if that does not help."""
    if child.stdin is not None:
        child.stdin.close()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _model(loaded: Loaded) -> str | None:
    settings = loaded.settings
    if settings.demo and settings.model is not None:
        raise UsageError("--demo and --model were both given", fixes=("leave one out",))
    if settings.demo:
        return "demo"
    return None if settings.model is None else model_argument(settings.model)


def _welcome(url: str, model: str | None) -> str:
    loaded = f"{model} answers" if model else "no model is loaded (ft load MODEL)"
    return f"{loaded} · OpenAI API {url}/v1 · control API {url}/api/v1 · Ctrl-C ends"


def _tell(kind: str, data: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        output.emit({"event": kind, "data": data})
        return
    failure = data.get("failure") or {}
    if "state" in data:  # a crash is told by the state that it leads to
        output.note(f"engine: {data['state']}" + (f", {failure['detail']}" if "detail" in failure else ""))


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(TERMINATED)
