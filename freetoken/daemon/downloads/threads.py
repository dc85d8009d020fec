"""Blocking work beside the event loop, and several pieces of work as one. Does not know what the work is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """`work` in a thread. A cancellation asks it to `stop` and waits for its end: no thread goes on writing behind the
    caller's back."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait({running})
        running.exception()  # looked at: the cancellation is what the caller asked for
        raise


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it at once. The first failure ends the rest and is raised as it is, not as a group."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
