"""The daemon process: `python -m freetoken.daemon.main`. Listens first, reads the rest of itself afterwards.

Owned mode (a desktop app started it): one JSON line on stdout says where it listens, and it ends when its stdin does.
Exit codes are those of core.errors: 0 ended as asked or one runs already, 2 port or folder of another, 5 refused.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from logging.handlers import RotatingFileHandler
from typing import TYPE_CHECKING, Any

import psutil

from freetoken import __version__
from freetoken.core.errors import FreeTokenError
from freetoken.daemon import discovery, store
from freetoken.daemon.discovery import Claimed, Record
from freetoken.daemon.guard import Guard
from freetoken.daemon.logbook import Formatter, Handler, Redactor
from freetoken.daemon.policy import Policy
from freetoken.daemon.state import Identity
from freetoken.daemon.store import Home
from freetoken.daemon.supervisor.logs import clean
from freetoken.settings.load import Loaded, load
from freetoken.settings.schema import KNOBS, Settings

if TYPE_CHECKING:
    from freetoken.daemon.app import Daemon
    from freetoken.daemon.front import Front
    from freetoken.daemon.server import Quiet

WORKER = (sys.executable, "-m", "freetoken.engine.worker")
LISTENERS_S = 1.0  # event streams get this long to say that they end
LOG_BYTES = 4 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Post:
    """What this process is and where it stands, before it serves."""

    home: Home
    settings: Settings
    identity: Identity
    policy: Policy
    claimed: Claimed
    owned: bool
    worker: tuple[str, ...]
    redact: Redactor


def main(arguments: Sequence[str] | None = None, worker: tuple[str, ...] = WORKER) -> int:
    """Runs until asked to end. `worker` is the engine program (tests have their own)."""
    flags = _parser().parse_args(arguments)
    owned = flags.__dict__.pop("owned")
    try:
        return _run(load(flags.__dict__), owned=owned, worker=worker)
    except FreeTokenError as error:
        _say(f"error: {error.detail}", *(f"fix: {fix}" for fix in error.fixes))
        return error.exit_code


def _run(loaded: Loaded, *, owned: bool, worker: tuple[str, ...]) -> int:
    settings = replace(loaded.settings, orphan_grace_s=0.0) if owned else loaded.settings
    home = store.open_home(settings.home)
    place = discovery.take_place(home, __version__)
    if isinstance(place, Record):
        if owned:
            _shake_hands(place, home, attached=True)
        else:
            _say(f"the daemon already runs at {place.url} (pid {place.pid})")
        return 0
    Policy.of(settings, "", settings.port)  # refuses an open address before anything listens
    claimed = discovery.claim_port(settings.host, settings.port, given=loaded.given("port"))
    if claimed.note:
        _say(claimed.note)
    identity = _identity(settings.host, claimed.port)
    policy = Policy.of(settings, store.read_or_make_token(home), claimed.port)
    redact = Redactor(clean, (policy.token, policy.api_key))
    _log_to(home, redact)
    try:
        asyncio.run(_serve(Post(home, settings, identity, policy, claimed, owned, worker, redact)))
    finally:
        discovery.remove_record(home, identity)
        place.release()
    return 0


async def _serve(post: Post) -> None:
    from freetoken.daemon.front import Front
    from freetoken.daemon.server import drop_unread, make_server

    loop = asyncio.get_running_loop()
    asked_to_end = asyncio.Event()

    def stop() -> None:
        with contextlib.suppress(RuntimeError):  # a signal after the loop has closed: we are ending already
            loop.call_soon_threadsafe(asked_to_end.set)

    front: Front[Daemon] = Front(lambda: _assemble(post, loop, stop), post.identity)
    server = make_server(Guard(front, post.policy))
    drop_unread(post.claimed.socket)
    _stop_on_signals(stop)
    serving = asyncio.create_task(server.serve(sockets=[post.claimed.socket]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.002)
    front.begin()
    _announce(post)
    if post.owned:
        threading.Thread(target=_wait_for_parent, args=(stop,), daemon=True).start()
    ending = asyncio.create_task(asked_to_end.wait())
    await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    await _end(front, server, serving)


async def _end(front: Front[Daemon], server: Quiet, serving: asyncio.Task[None]) -> None:
    """No new connection, what runs gets a moment, then the engine goes."""
    daemon = await front.made()
    daemon.context.hub.close()
    await daemon.context.hub.all_left(LISTENERS_S)
    server.end()
    await serving
    await daemon.close()
    log.info("ended")


def _assemble(post: Post, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Daemon:
    """In a thread: everything that is slow to import. From then on our own log is in the event stream."""
    from freetoken.daemon.app import Start, assemble

    daemon = assemble(Start(post.home, post.settings, post.identity, post.worker, post.redact, stop))
    logging.getLogger().addHandler(Handler(daemon.context.hub, loop))
    return daemon


def _announce(post: Post) -> None:
    discovery.write_record(post.home, post.identity)
    log.info("listening at %s (pid %d, version %s)", post.identity.url, post.identity.pid, post.identity.version)
    if post.owned:
        _shake_hands(Record.of(post.identity), post.home, attached=False)
    else:
        _say(f"listening at {post.identity.url}")


def _shake_hands(record: Record, home: Home, *, attached: bool) -> None:
    """The one line on stdout; the token itself is never on it."""
    line = {
        "event": "listening",
        "url": record.url,
        "pid": record.pid,
        "start_time": record.start_time,
        "api_version": record.api_version,
        "instance_id": record.instance_id,
        "token_file": str(home.token_file),
        "attached": attached,
    }
    print(json.dumps(line), flush=True)


def _identity(host: str, port: int) -> Identity:
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(host, host)
    shown = f"[{reachable}]" if ":" in reachable and not reachable.startswith("[") else reachable
    return Identity(
        instance_id=secrets.token_hex(8),
        version=__version__,
        url=f"http://{shown}:{port}",
        pid=os.getpid(),
        start_time=psutil.Process().create_time(),
    )


def _stop_on_signals(stop: Any) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # whoever runs us in a thread has the signals
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop())


def _wait_for_parent(stop: Any) -> None:
    """stdin ends when the parent does, however that comes."""
    while sys.stdin.buffer.read(4096):
        pass
    stop()


def _log_to(home: Home, redact: Redactor) -> None:
    handler = RotatingFileHandler(home.logs / "daemon.log", maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(Formatter(redact))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # below that it writes down URLs


def _say(*lines: str) -> None:
    """To people, on stderr: stdout is for the one line that programs read."""
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    """The daemon's flags, out of the settings schema. Values stay text: settings.load gives types and names errors."""
    parser = argparse.ArgumentParser(
        prog="freetoken.daemon.main", description="The FreeToken daemon.", allow_abbrev=False
    )
    parser.add_argument("--owned", action="store_true", help="One JSON line on stdout; end when stdin does.")
    for knob in KNOBS.values():
        if knob.scope == "daemon" and knob.flag:
            shape: dict[str, Any] = {"action": "store_true"} if knob.kind == "switch" else {"default": None}
            parser.add_argument(knob.flag, dest=knob.name, help=knob.help.replace("%", "%%"), **shape)
    return parser


if __name__ == "__main__":
    sys.exit(main())
