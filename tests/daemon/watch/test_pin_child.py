"""The pinning steps against a driver in memory that refuses, corrupts or serves; the real one only where CUDA is."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from freetoken.daemon.watch import pin_child
from freetoken.daemon.watch.pin_child import SAMPLE, CudaError, probe

STEP = 2 * SAMPLE


class Memory:
    """A driver whose device is a buffer. `limit` bytes can be pinned; `zeros` copies to the device leave zeros there,
    `lost` copies back do nothing; all of them say that they worked.
    """

    def __init__(self, limit: int, zeros: int = 0, lost: int = 0) -> None:
        self.limit, self.zeros, self.lost = limit, zeros, lost
        self.device_memory = ctypes.create_string_buffer(SAMPLE)
        self.blocks: dict[int, Any] = {}

    def pin(self, size: int) -> ctypes.c_void_p:
        if (len(self.blocks) + 1) * size > self.limit:
            raise CudaError("cuMemHostAlloc gave error 2")
        block = ctypes.create_string_buffer(size)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.c_void_p(ctypes.addressof(block))

    def device(self, size: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(ctypes.addressof(self.device_memory))

    def call(self, name: str, *arguments: Any) -> None:
        if name == "cuMemFreeHost":
            del self.blocks[arguments[0].value]
            return
        to, origin, size = (argument.value for argument in arguments)
        if name == "cuMemcpyHtoD_v2" and self.zeros:
            self.zeros -= 1
            ctypes.memset(to, 0, size)
        elif name == "cuMemcpyDtoH_v2" and self.lost:
            self.lost -= 1
        else:
            ctypes.memmove(to, origin, size)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_child, "STEP", STEP)


def test_all_that_was_asked_for_is_pinned_and_freed() -> None:
    driver = Memory(limit=100 * STEP)
    assert probe(driver, 5 * STEP, 30.0) == {"pinned": 5 * STEP, "refused": False, "corrupt": 0, "error": None}
    assert driver.blocks == {}


def test_the_limit_is_where_it_is_refused() -> None:
    """FT #55: pinning failed part way and took the program along."""
    driver = Memory(limit=3 * STEP)
    found = probe(driver, 8 * STEP, 30.0)
    assert (found["pinned"], found["refused"]) == (3 * STEP, True)
    assert driver.blocks == {}


def test_zeros_left_by_a_copy_that_said_it_worked_are_seen() -> None:
    """FT #291: on WSL2 copies from fresh pinned memory left zeros."""
    assert probe(Memory(limit=100 * STEP, zeros=2), 5 * STEP, 30.0)["corrupt"] == 2
    assert probe(Memory(limit=100 * STEP, lost=1), 5 * STEP, 30.0)["corrupt"] == 1


def test_time_is_a_bound_too() -> None:
    assert probe(Memory(limit=100 * STEP), 5 * STEP, 0.0)["pinned"] == 0
