"""The engine process: `python -m freetoken.engine.worker --runtime FILE`.

Reads the rendezvous file that the daemon has written, listens on its socket before anything heavy is imported, adds
its pid to the file, and obeys one daemon at a time: load, submit, cancel, status, drain, shutdown. Three threads never
wait for one another: this module's event loop does all input and output and the beat, the engine's thread loads and
then computes (loop.py). Without its daemon it cancels every request and lives on for `orphan_grace_s`.

Exit codes: 0 told to stop (shutdown, SIGTERM) · 2 bad command line or rendezvous file · 3 the load failed (a `failed`
message said why) · 4 a step ended in an unexpected error (the traceback is on stderr) · 5 no daemon came (back), or the
rendezvous file is another engine's by now.

Does not know HTTP, text or how a model is built (assemble.py, imported when a load comes).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import psutil

from freetoken import __version__
from freetoken.core.errors import (
    EngineError,
    EngineProtocolError,
    FreeTokenError,
    LifecycleBusy,
    ModelNotLoaded,
    OutOfMemory,
)
from freetoken.engine.loop import EngineLoop, StepRunner
from freetoken.engine.paging.rules import Layout
from freetoken.engine.scheduler.scheduler import Told
from freetoken.engine.threads import wait_politely
from freetoken.plan.choices import Resolved
from freetoken.wire import channel, codec, translate
from freetoken.wire.messages import (
    PROTO,
    Beat,
    Cancel,
    Down,
    Drain,
    Hello,
    Load,
    Log,
    Message,
    Phase,
    Ready,
    Shutdown,
    Status,
    Submit,
    Value,
)
from freetoken.wire.rendezvous import Rendezvous

EXIT_OK, EXIT_USAGE, EXIT_LOAD_FAILED, EXIT_CRASHED, EXIT_ORPHANED = 0, 2, 3, 4, 5
FIRST_DAEMON_S = 30.0  # how long a daemon may take to connect the first time
HELLO_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 1.0  # for the running step; the operating system frees what is left
BEAT_S = 1.0

log = logging.getLogger("freetoken.engine")

Report = Callable[[str, int, int, str], None]  # phase, done, total, unit
Cancelled = Callable[[], bool]


class Built(Protocol):
    """A model that can run steps (assemble.Engine)."""

    @property
    def runner(self) -> StepRunner: ...
    @property
    def resolved(self) -> Resolved: ...
    @property
    def measured(self) -> Mapping[str, Value]: ...
    def close(self) -> None: ...


Assemble = Callable[[Path, Resolved, Report, Cancelled], Built]


def serve_engine(runtime: Path, assemble: Assemble) -> int:
    """Be an engine until told to stop; returns the exit code. Raises EngineStartFailed for a bad `runtime` file."""
    return asyncio.run(_Worker(Rendezvous.read(runtime), assemble).serve(runtime))


def assemble_model(path: Path, resolved: Resolved, report: Report, cancelled: Cancelled) -> Built:
    """assemble.assemble; torch is imported only now: the socket answers long before."""
    report("import", 0, 1, "steps")
    wait_politely()
    from freetoken.engine.assemble import assemble

    report("import", 1, 1, "steps")
    return assemble(path, resolved, report, cancelled)


class _Worker:
    def __init__(self, where: Rendezvous, assemble: Assemble) -> None:
        self._where, self._assemble = where, assemble
        self._daemon: channel.Channel[Down] | None = None
        self._thread: threading.Thread | None = None  # from the first load on
        self._engine: EngineLoop | None = None  # once loaded
        self._ready: Ready | None = None
        self._latest: Phase | None = None  # of the load
        self._met = False  # whether a daemon has been here
        self._stopping = threading.Event()
        self._orphan: asyncio.TimerHandle | None = None

    async def serve(self, runtime: Path) -> int:
        self._io = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._io.create_future()
        listener = await channel.serve(self._where.socket, codec.DOWN, self._connected)
        self._sign(runtime)
        self._wait_for_daemon(max(FIRST_DAEMON_S, self._where.orphan_grace_s))
        with contextlib.suppress(NotImplementedError):  # Windows has no SIGTERM
            self._io.add_signal_handler(signal.SIGTERM, self._quit, EXIT_OK)
        logging.getLogger().addHandler(_LogToDaemon(self._post))
        beat = asyncio.create_task(self._beat())
        code = await self._exit
        beat.cancel()
        listener.close()
        await self._stop_engine()
        if self._daemon is not None:
            await self._daemon.close()
        channel.remove(self._where.socket)
        return code

    def _sign(self, runtime: Path) -> None:
        """Put our pid into the file, unless it names another engine: then nobody waits for this one any more."""
        now = Rendezvous.find(runtime)
        if now is None or now.instance_id != self._where.instance_id:
            self._quit(EXIT_ORPHANED)
            return
        process = psutil.Process()
        msgspec.structs.replace(self._where, pid=process.pid, start_time=process.create_time()).write(runtime)

    # ── the daemon ──────────────────────────────────────────────────────────────────────────────────────────────────
    async def _connected(self, daemon: channel.Channel[Down]) -> None:
        try:
            if not await self._greet(daemon):
                return
            while (message := await daemon.receive()) is not None:
                self._obey(message)
        except EngineProtocolError as error:
            log.warning("connection closed: %s", error.detail)
        finally:
            if self._daemon is daemon:
                self._daemon = None
                self._lost_daemon()
            await daemon.close()

    async def _greet(self, daemon: channel.Channel[Down]) -> bool:
        """Shake hands. False, or EngineProtocolError, where this is not our daemon or we have one."""
        ours = Hello(proto=PROTO, instance_id=self._where.instance_id, nonce=self._where.nonce, build=__version__)
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                theirs = await daemon.receive()
        except TimeoutError:
            return False
        if isinstance(theirs, Hello) and theirs.proto != PROTO:
            daemon.send(msgspec.structs.replace(ours, nonce=""))  # says why before it closes, and no secret
        codec.check_hello(theirs, self._where.nonce)
        if self._daemon is not None:
            return False
        self._daemon, self._met = daemon, True
        if self._orphan is not None:
            self._orphan.cancel()
        where_it_is = self._ready or self._latest  # for a daemon that did not begin this load
        daemon.send(ours, *([where_it_is] if where_it_is else []))
        return True

    def _lost_daemon(self) -> None:
        if self._engine is not None:
            self._engine.cancel_all()
        if not self._exit.done():
            log.warning("the daemon is gone; waiting %g s for it", self._where.orphan_grace_s)
            self._wait_for_daemon(self._where.orphan_grace_s)

    def _wait_for_daemon(self, seconds: float) -> None:
        if self._orphan is not None:
            self._orphan.cancel()
        self._orphan = self._io.call_later(seconds, self._quit, EXIT_ORPHANED)

    def _obey(self, message: Down) -> None:
        match message:
            case Load():
                self._start(message)
            case Shutdown():
                self._quit(EXIT_OK)
            case Hello():
                raise EngineProtocolError("The daemon said hello twice.")
            case _ if self._engine is None:
                if isinstance(message, Submit):
                    self._post(translate.failed(ModelNotLoaded("The engine has not loaded its model yet."), message.id))
            case Submit():
                self._engine.submit(translate.request(message))
            case Cancel(id=request_id):
                self._engine.cancel(request_id)
            case Status():
                self._engine.report()
            case Drain(deadline_ms=deadline_ms):
                self._engine.drain(deadline_ms / 1000)

    # ── the engine's thread ─────────────────────────────────────────────────────────────────────────────────────────
    def _start(self, load: Load) -> None:
        if self._thread is not None:
            self._post(translate.failed(LifecycleBusy("This engine process has been given a model already.")))
            return
        self._thread = threading.Thread(target=self._live, args=(load,), name="engine", daemon=True)
        self._thread.start()

    def _live(self, load: Load) -> None:
        """Load, then compute until stopped. Whatever goes wrong is said to the daemon and in the log, then ends us."""
        try:
            built = self._build(load)
        except FreeTokenError as error:
            self._give_up(error)
        except MemoryError:
            self._give_up(OutOfMemory("Memory ran out while the model was loaded: close other programs and try again."))
        except Exception as error:  # a bug: said to the daemon and in the log, and the process ends
            log.exception("the load failed")
            self._give_up(EngineError(f"The load stopped on an unexpected {type(error).__name__}: {error}"))
        else:
            self._compute(built)

    def _build(self, load: Load) -> Built:
        # brings the catalog: not before the socket listens
        from freetoken.plan.report import resolved_from_json, summary

        began = time.monotonic()
        try:
            resolved, path = resolved_from_json(load.plan), Path(load.files["model"])
        except (KeyError, TypeError) as error:
            raise EngineProtocolError(f"The load message is not complete: {error!r}.") from error
        for line in summary(load.plan):
            log.info("%s", line)
        built = self._assemble(path, resolved, self._phase, self._stopping.is_set)
        measured = {**built.measured, "load_s": round(time.monotonic() - began, 3)}
        log.info("loaded: %s", ", ".join(f"{name} {value}" for name, value in measured.items()))
        self._ready = Ready(plan=load.plan, measured=measured)
        return built

    def _compute(self, built: Built) -> None:
        assert self._ready is not None
        engine = EngineLoop(built.runner, built.resolved, Layout(built.resolved.page_size), self._publish, self._post)
        self._engine = engine
        self._post(self._ready)
        engine.report()
        try:
            engine.run()
        except Exception:  # a bug: the loop has told every caller, and the process ends
            log.exception("a step failed")
            self._io.call_soon_threadsafe(self._quit, EXIT_CRASHED)
        finally:
            built.close()

    def _give_up(self, error: FreeTokenError) -> None:
        log.error("%s: %s", error.code, error.detail)
        self._post(translate.failed(error))
        self._io.call_soon_threadsafe(self._quit, EXIT_LOAD_FAILED)

    def _phase(self, name: str, done: int, total: int, unit: str) -> None:
        self._latest = Phase(name=name, done=done, total=total, unit=unit)
        self._post(self._latest)

    def _publish(self, told: Sequence[Told]) -> None:
        self._post(*(translate.message(request_id, event) for request_id, event in told))

    def _post(self, *messages: Message) -> None:
        """Send to the daemon, from any thread; dropped where there is none, or at the end."""
        if not self._stopping.is_set():
            self._io.call_soon_threadsafe(self._write, b"".join(map(codec.encode, messages)))

    # ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _quit(self, code: int) -> None:
        """End with `code`; only the first call counts."""
        if not self._exit.done():
            self._exit.set_result(code)

    async def _stop_engine(self) -> None:
        self._stopping.set()
        if self._engine is not None:
            self._engine.stop()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    # ── what runs all the time ──────────────────────────────────────────────────────────────────────────────────────
    def _write(self, frames: bytes) -> None:
        if self._daemon is not None:
            self._daemon.send_frames(frames)

    async def _beat(self) -> None:
        """From this thread, not the engine's: a step that hangs shows as an age that grows."""
        while True:
            step, age_ms = self._engine.pulse() if self._engine is not None else (0, 0)
            self._post(Beat(step=step, step_age_ms=age_ms))
            await asyncio.sleep(BEAT_S)
            self._check_first_daemon()

    def _check_first_daemon(self) -> None:
        """A daemon that died before it came here closes no connection: its pid tells."""
        starter = self._where.daemon_pid
        if not self._met and starter is not None and not _runs(starter):
            self._met = True  # once is enough
            self._lost_daemon()


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


class _LogToDaemon(logging.Handler):
    def __init__(self, post: Callable[[Message], None]) -> None:
        super().__init__()
        self._post = post

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            self._post(Log(level=record.levelname.lower(), line=line))


def main(arguments: Sequence[str] | None = None, assemble: Assemble = assemble_model) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="freetoken.engine.worker", description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", type=Path, required=True, help="the rendezvous file that the daemon wrote")
    runtime = parser.parse_args(arguments).runtime
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    faulthandler.enable()
    if hasattr(faulthandler, "register"):  # POSIX
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        return serve_engine(runtime, assemble)
    except (FreeTokenError, OSError) as error:
        log.error("cannot start: %s", error)
        return EXIT_USAGE


def exit_now(code: int) -> None:
    """Leave without waiting for the engine's thread or for libraries to tidy up: the system frees memory faster."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
