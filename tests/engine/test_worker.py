"""The engine process as the supervisor sees it: how it starts, what it leaves, how and with which code it ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from freetoken.core.errors import EngineDied
from freetoken.wire import messages as m
from freetoken.wire.rendezvous import Rendezvous
from tests.fakes.process import ROOT, collect, engine_process, load_events, request, run
from tests.fakes.runner import oracle

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")


def test_the_worker_can_be_imported_without_torch() -> None:
    code = (
        "import sys; sys.modules.update({name: None for name in ('torch', 'numpy', 'triton', 'transformers')})\n"
        "import freetoken.engine.worker, freetoken.engine.inproc, freetoken.wire.remote"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


def test_it_listens_at_once_and_says_who_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        began = time.monotonic()
        async with engine_process(tmp_path) as process:
            engine = await process.connect()
            print(f"listening after {time.monotonic() - began:.2f} s")
            assert time.monotonic() - began < 5.0
            where = Rendezvous.read(process.runtime)
            assert where.pid == process.process.pid and where.nonce == process.where.nonce
            assert where.start_time == psutil.Process(where.pid).create_time()
            arguments = psutil.Process(where.pid).cmdline()
            environment = psutil.Process(where.pid).environ()
            assert not any(where.nonce in text for text in [*arguments, *environment.values()])
            assert await engine.shutdown()
            assert await process.exit_code() == 0
            assert not Path(where.socket).exists()
            assert [path.name for path in tmp_path.iterdir()] == ["engine.json"]

    run(test)


@pytest.mark.slow
def test_shutdown_ends_a_long_load_and_a_long_step(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.connect()
            loading = asyncio.create_task(load_events(engine, process.files(load_s=60.0)))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            assert await engine.shutdown()
            assert await process.exit_code() == 0 and time.monotonic() - began < 1.5
            with pytest.raises(EngineDied):
                await loading
        async with engine_process(tmp_path) as process:
            engine = await process.loaded(step_s=30.0)
            stream = asyncio.create_task(collect(engine.generate(request("a", [1], 5))))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            await engine.shutdown()
            assert await process.exit_code() == 0 and time.monotonic() - began < 2.0
            with pytest.raises(EngineDied):
                await stream

    run(test)


@pytest.mark.parametrize(
    ("kind", "code", "detail"),
    [("small", "HOST_RAM_TOO_SMALL", "9 GiB"), ("bug", "ENGINE_ERROR", "ZeroDivisionError: a bug")],
)
def test_a_load_that_fails_says_why_and_ends_the_process(tmp_path: Path, kind: str, code: str, detail: str) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.connect()
            *_, last = await load_events(engine, process.files(load=kind))
            assert isinstance(last, m.Failed) and last.id is None
            assert last.code == code and detail in last.detail
            assert await process.exit_code() == 3
            assert ("Traceback" in await process.errors()) is (kind == "bug")

    run(test)


def test_a_load_message_without_a_plan_is_a_typed_failure(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.connect()
            (last,) = [event async for event in engine.load({"schema": 1}, {})]
            assert isinstance(last, m.Failed) and last.code == "ENGINE_PROTOCOL"
            assert await process.exit_code() == 3

    run(test)


def test_a_bug_in_a_step_tells_every_caller_logs_it_and_ends_the_process(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            engine = await process.loaded(step_s=0.005, errors={"9": "bug"})
            logs: list[str] = []
            engine.on_log = lambda log: logs.append(log.line)
            streams = [engine.generate(request(name, [1, 2], 50)) for name in "abcdefg"]

            async def ended(number: int) -> object:
                return [event async for event in streams[number]][-1]

            lasts = await asyncio.gather(*(ended(number) for number in range(7)))
            assert [last.code for last in lasts] == ["ENGINE_ERROR"] * 7  # type: ignore[attr-defined]
            assert await process.exit_code() == 4
            assert "ZeroDivisionError: a bug" in await process.errors()
            assert any("ZeroDivisionError" in line for line in logs)

    run(test)


def test_in_owned_mode_it_ends_with_its_daemon(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path, orphan_grace_s=0.0) as process:
            engine = await process.loaded(step_s=0.005)
            await anext(engine.generate(request("a", [1], 4000)))
            began = time.monotonic()
            await engine.close()
            assert await process.exit_code() == 5 and time.monotonic() - began < 1.5

    run(test)


@pytest.mark.slow
def test_an_orphan_frees_its_requests_takes_its_daemon_back_and_ends_when_none_comes(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path, orphan_grace_s=1.0) as process:
            engine = await process.loaded(step_s=0.005)
            await anext(engine.generate(request("a", [1], 4000)))
            await engine.close()
            await asyncio.sleep(0.3)
            again = await process.connect()
            assert await collect(again.generate(request("a", [1], 3))) == oracle([1], 3)
            assert again.ready is not None and again.ready.measured["weights_bytes"] == 12
            await asyncio.sleep(1.2)  # the former grace has passed
            assert (await again.status()).running == 0
            began = time.monotonic()
            await again.close()
            assert await process.exit_code() == 5
            assert 0.9 < time.monotonic() - began < 2.5

    run(test)


@posix
def test_sigterm_ends_it_and_sigusr1_dumps_every_stack(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_process(tmp_path) as process:
            await (await process.loaded()).status()  # its loop runs
            process.process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(0.2)
            process.process.send_signal(signal.SIGTERM)
            assert await process.exit_code() == 0
            errors = await process.errors()
            assert errors.count("Thread 0x") + errors.count("Current thread") >= 2 and "_turn" in errors

    run(test)


@pytest.mark.parametrize("arguments", [[], ["--runtime", "/nonexistent/engine.json"]])
def test_a_bad_command_line_is_exit_code_2(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "freetoken.engine.worker", *arguments], cwd=ROOT, capture_output=True, timeout=30
    )
    assert done.returncode == 2 and (b"engine.json" in done.stderr or b"--runtime" in done.stderr)
