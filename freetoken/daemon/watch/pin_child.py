"""Finds out how much host memory the CUDA driver pins, and whether copies out of it arrive: one JSON object.

`python -m freetoken.daemon.watch.pin_child BYTES SECONDS` pins in steps up to both bounds and frees everything at once.
Speaks to the driver library by ctypes (CUDA driver API, cuda.h): no toolkit, no torch. Runs in a process of its own.
Prints {"skipped": reason}, or {"pinned", "refused", "corrupt", "error"}. Judges nothing.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

STEP = 256 << 20  # bytes
SAMPLE = 1 << 20  # bytes of each step that go to the device and back
SUCCESS = 0
LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


class CudaError(Exception):
    """A call that the driver refused, with its number."""


class Driver:
    """The few calls that are needed, in a context of device 0."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)  # OSError where there is none
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != SUCCESS:
            raise CudaError(f"{name} gave error {result}")

    def pin(self, size: int) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size), 0)
        return pointer

    def device(self, size: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer


def probe(driver: Driver, most: int, seconds: float) -> dict[str, Any]:
    """Pin until `most` bytes, `seconds` or a refusal; check a sample of each step."""
    until = time.monotonic() + seconds
    refusal, corrupt = None, 0
    blocks: list[ctypes.c_void_p] = []
    mirror = driver.device(SAMPLE)
    while len(blocks) * STEP < most and time.monotonic() < until:
        try:
            blocks.append(driver.pin(STEP))
        except CudaError as error:
            refusal = str(error)
            break
        corrupt += not _survives(driver, blocks[-1], mirror, len(blocks))
    pinned = len(blocks) * STEP
    for block in blocks:
        driver.call("cuMemFreeHost", block)
    return {"pinned": pinned, "refused": refusal is not None, "corrupt": corrupt, "error": refusal}


def _survives(driver: Driver, block: ctypes.c_void_p, mirror: ctypes.c_uint64, seed: int) -> bool:
    """Whether a pattern comes back from the device: copies that say they worked have left zeros."""
    size, address = ctypes.c_size_t(SAMPLE), block.value or 0
    pattern = bytes((seed + index) % 251 for index in range(4096)) * (SAMPLE // 4096)
    ctypes.memmove(address, pattern, SAMPLE)
    driver.call("cuMemcpyHtoD_v2", mirror, ctypes.c_void_p(address), size)
    ctypes.memset(address, 0, SAMPLE)
    driver.call("cuMemcpyDtoH_v2", ctypes.c_void_p(address), mirror, size)
    return ctypes.string_at(address, SAMPLE) == pattern


def main(most: int, seconds: float) -> None:
    """One document on stdout."""
    try:
        driver = Driver()
    except (OSError, CudaError) as error:
        print(json.dumps({"skipped": str(error)}))
        return
    try:
        print(json.dumps(probe(driver, most, seconds)))
    except CudaError as error:
        print(json.dumps({"pinned": 0, "refused": False, "corrupt": 0, "error": str(error)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
