"""The daemon's end of an engine process: connect, load, generate, watch, stop.

Implements core.ports.GenerationBackend over one Channel. Does not start, kill or restart processes (the supervisor
does) and does not know text. Every wait here ends: at its own deadline, or when the engine has been silent for
SILENCE_S (it beats once a second even while it loads).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from freetoken import __version__
from freetoken.core import events
from freetoken.core.errors import DeadlineExceeded, EngineDied, EngineProtocolError
from freetoken.core.types import GenerateRequest
from freetoken.wire import channel, codec, translate
from freetoken.wire.messages import (
    PROTO,
    Beat,
    Cancel,
    Drain,
    Failed,
    Hello,
    Load,
    Log,
    Phase,
    Progress,
    Ready,
    Shutdown,
    Stats,
    Status,
    Tokens,
    Up,
)
from freetoken.wire.rendezvous import Rendezvous
from freetoken.wire.streams import Streams

SILENCE_S = 60.0
HELLO_TIMEOUT_S = 10.0
LoadEvent = Phase | Ready | Failed


class RemoteEngine:
    """One connection to one engine process. Use it on the event loop that made it."""

    def __init__(self, connection: channel.Channel[Up], hello: Hello) -> None:
        self.hello = hello
        self.ready: Ready | None = None  # also set by an engine that had loaded before we came
        self.stats: Stats | None = None  # the latest
        self.beat: Beat | None = None
        self.received = 0  # messages so far: one that beats but computes nothing is told by `beat`
        self.on_log: Callable[[Log], None] | None = None
        self.on_stats: Callable[[Stats], None] | None = None
        self.on_beat: Callable[[Beat], None] | None = None
        self._channel = connection
        self._streams = Streams(self._submit, self._cancel)
        self._loading: asyncio.Queue[LoadEvent | EngineDied] = asyncio.Queue()
        self._asked: asyncio.Future[Stats] | None = None  # whoever waits in status()
        self._gone: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def connect(cls, where: Rendezvous, timeout_s: float = 10.0) -> RemoteEngine:
        """Connect and shake hands.

        Raises EngineDied when nobody listens or answers, EngineProtocolError for a stranger or another PROTO.
        """
        connection = await channel.connect(where.socket, codec.UP, timeout_s)
        try:
            connection.send(Hello(proto=PROTO, instance_id=where.instance_id, nonce=where.nonce, build=__version__))
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = codec.check_hello(await connection.receive(), where.nonce)
        except TimeoutError:
            await connection.close()
            raise EngineDied(f"The engine did not say hello within {HELLO_TIMEOUT_S:g} s.") from None
        except EngineProtocolError:
            await connection.close()
            raise
        return cls(connection, hello)

    async def load(self, plan: Mapping[str, object], files: Mapping[str, str]) -> AsyncGenerator[LoadEvent, None]:
        """Load a model: Phase by Phase, then one Ready or one Failed. Raises EngineDied when the engine goes.

        Total time is not limited here: whoever reads decides what a stall is.
        """
        self._channel.send(Load(plan=dict(plan), files=dict(files)))
        async with aclosing(self.follow()) as events:
            async for event in events:
                yield event

    async def follow(self) -> AsyncGenerator[LoadEvent, None]:
        """`load` where another daemon began it: the engine says again where it is to whoever connects.

        Nothing comes where no load was asked for.
        """
        while True:
            event = await self._loading.get()  # _end wakes us when the engine goes
            if isinstance(event, EngineDied):
                raise event
            yield event
            if not isinstance(event, Phase):
                return

    def generate(self, request: GenerateRequest) -> AsyncGenerator[events.GenerationEvent, None]:
        """core.ports.GenerationBackend."""
        return self._streams.run(request)

    @property
    def idle_s(self) -> float:
        """Seconds since the last generation ended; 0 while one runs."""
        return self._streams.idle_s

    @property
    def gone(self) -> EngineDied | None:
        """Why the engine is gone; None while it is there."""
        return self._gone.result() if self._gone.done() else None

    async def wait_gone(self) -> EngineDied:
        """Returns when the connection has ended, with the reason."""
        return await asyncio.shield(self._gone)

    async def status(self, timeout_s: float = 5.0) -> Stats:
        """Counters as of now. Raises DeadlineExceeded (a long step is running, or nothing is loaded), EngineDied."""
        if self._gone.done():
            raise EngineDied(self._gone.result().detail)
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
            self._channel.send(Status())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._asked)
        except TimeoutError:
            raise DeadlineExceeded(f"The engine did not report within {timeout_s:g} s.") from None

    def drain(self, deadline_s: float) -> None:
        """Take no new request; cancel what still runs after `deadline_s`. Over when stats count none."""
        self._channel.send(Drain(deadline_ms=round(deadline_s * 1000)))

    async def shutdown(self, timeout_s: float = 5.0) -> bool:
        """Ask the engine to free everything and exit. True when its end closed within `timeout_s`."""
        self._channel.send(Shutdown())
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_gone()
        except TimeoutError:
            return False
        finally:
            await self.close()
        return True

    async def close(self) -> None:
        """Let go of the engine; it goes on living for its orphan grace. Streams in flight raise EngineDied."""
        self._end("the connection was closed here")
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        await self._channel.close()

    # ── from the engine ─────────────────────────────────────────────────────────────────────────────────────────────
    async def _listen(self) -> None:
        now = asyncio.get_running_loop().time
        reason = "its connection closed"
        try:
            async with asyncio.timeout(SILENCE_S) as silence:
                while (message := await self._channel.receive()) is not None:
                    silence.reschedule(now() + SILENCE_S)
                    self.received += 1
                    self._dispatch(message)
        except TimeoutError:
            reason = f"it was silent for {SILENCE_S:g} s"
        except EngineProtocolError as error:
            reason = error.detail
        finally:
            self._end(reason)
            await self._channel.close()

    def _dispatch(self, message: Up) -> None:
        match message:
            case Tokens(id=request_id) | Progress(id=request_id) | Failed(id=str() as request_id):
                self._streams.deliver(request_id, translate.event(message))
            case Phase() | Failed():
                self._loading.put_nowait(message)
            case Ready():
                self.ready = message
                self._loading.put_nowait(message)
            case Stats():
                self.stats = message
                if self._asked is not None:
                    self._asked.set_result(message)
                    self._asked = None
                if self.on_stats is not None:
                    self.on_stats(message)
            case Beat():
                self.beat = message
                if self.on_beat is not None:
                    self.on_beat(message)
            case Log():
                if self.on_log is not None:
                    self.on_log(message)
            case Hello():
                raise EngineProtocolError("The engine said hello twice.")

    def _end(self, reason: str) -> None:
        if not self._gone.done():
            died = EngineDied(f"The engine process is gone: {reason}.")
            self._gone.set_result(died)
            self._streams.end(died)
            self._loading.put_nowait(died)
            if self._asked is not None:
                self._asked.set_exception(died)
                self._asked.exception()  # nobody may be waiting any more

    # ── to the engine ───────────────────────────────────────────────────────────────────────────────────────────────
    def _submit(self, request: GenerateRequest) -> None:
        self._channel.send(translate.submit(request))

    def _cancel(self, request_id: str) -> None:
        self._channel.send(Cancel(id=request_id))
