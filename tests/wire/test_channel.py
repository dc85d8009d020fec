"""Private connections over real sockets."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from freetoken.core.errors import EngineDied, EngineStartFailed
from freetoken.wire import channel, codec
from freetoken.wire import messages as m
from freetoken.wire.rendezvous import Rendezvous

posix = pytest.mark.skipif(sys.platform == "win32", reason="Unix sockets")


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(limited())


def test_messages_go_both_ways_until_one_side_closes() -> None:
    async def test() -> None:
        address = channel.private_address("test-both-ways")
        got: list[object] = []

        async def engine(daemon: channel.Channel[m.Down]) -> None:
            while (message := await daemon.receive()) is not None:
                got.append(message)
                daemon.send(m.Beat(step=len(got), step_age_ms=0), m.Log(level="info", line="x"))
            await daemon.close()

        listener = await channel.serve(address, codec.DOWN, engine)
        try:
            daemon = await channel.connect(address, codec.UP, 2.0)
            daemon.send(m.Status(), m.Shutdown())
            answers = [await daemon.receive() for _ in range(4)]
            assert [answer.step for answer in answers if isinstance(answer, m.Beat)] == [1, 2]
            await daemon.close()
            daemon.send(m.Status())  # says nothing, raises nothing
            assert got == [m.Status(), m.Shutdown()]
        finally:
            listener.close()
            channel.remove(address)

    run(test)


@posix
def test_only_this_user_can_reach_the_socket_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        for private in (True, False):
            base = tmp_path / str(private)
            base.mkdir(mode=0o700)
            base.chmod(0o700 if private else 0o755)
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
            address = Path(channel.private_address("test"))
            assert (address.parent == base / "freetoken") is private
            assert len(os.fsencode(address)) < 104
            listener = await channel.serve(str(address), codec.DOWN, lambda daemon: daemon.close())
            assert stat.S_IMODE(address.stat().st_mode) == 0o600
            assert stat.S_IMODE(address.parent.stat().st_mode) == 0o700
            listener.close()
            channel.remove(str(address))
            channel.remove(str(address))
            assert not address.exists() and address.parent.exists() is private

    run(test)


@posix
def test_a_runtime_folder_with_a_long_name_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / ("long" * 30)
    base.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    address = channel.private_address("test")
    channel.remove(address)
    assert len(address) < 104 and not Path(address).parent.exists()


def test_connecting_waits_for_the_listener_and_not_longer_than_asked() -> None:
    async def test() -> None:
        address = channel.private_address("test-late")
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineDied, match=r"0\.2 s"):
            await channel.connect(address, codec.UP, 0.2)
        assert asyncio.get_running_loop().time() - began < 1.0
        connecting = asyncio.create_task(channel.connect(address, codec.UP, 5.0))
        await asyncio.sleep(0.1)
        listener = await channel.serve(address, codec.DOWN, lambda daemon: daemon.close())
        daemon = await connecting
        assert await daemon.receive() is None
        await daemon.close()
        listener.close()
        channel.remove(address)

    run(test)


def test_a_reader_that_never_reads_is_cut_off_instead_of_filling_memory() -> None:
    async def test() -> None:
        address = channel.private_address("test-slow")
        connected = asyncio.Event()

        async def deaf(daemon: channel.Channel[m.Down]) -> None:
            connected.set()
            await asyncio.sleep(10)

        listener = await channel.serve(address, codec.DOWN, deaf)
        daemon = await channel.connect(address, codec.UP, 2.0)
        await connected.wait()
        for _ in range(10):
            daemon.send(m.Load(plan={}, files={"x": "y" * (8 << 20)}))
        assert await daemon.receive() is None
        listener.close()
        channel.remove(address)

    run(test)


def test_the_rendezvous_file_is_private_and_comes_back_as_written(tmp_path: Path) -> None:
    where = Rendezvous.new(orphan_grace_s=3.0)
    channel.remove(where.socket)
    path = tmp_path / "engine.json"
    path.write_text("old")
    where.write(path)
    assert Rendezvous.read(path) == where
    assert where.orphan_grace_s == 3.0 and len(where.nonce) >= 43
    assert [file.name for file in tmp_path.iterdir()] == ["engine.json"]
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", [None, "", "{}", '{"socket": 3}'])
def test_a_rendezvous_file_that_is_not_one_is_a_typed_error(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "engine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EngineStartFailed, match=r"engine\.json"):
        Rendezvous.read(path)
