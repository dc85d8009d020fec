"""Print the ceilings of a GPU machine as one JSON line: PCIe copies, zero-copy reads, both lanes at once, device copy,
DRAM read, bf16 product. Figures are GB/s unless the name says otherwise; run it in the same call as what it judges.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

BUFFER = 1 << 30  # bytes
EXPERTS = (9437184, 2654208)  # bytes of one bf16 and one NVFP4 expert of Qwen3-30B-A3B
DRAM_BYTES = 8 << 30


@triton.jit
def gather(src, dst, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + i, tl.load(src + i, mask=i < n), mask=i < n)


def rate(call: Callable[[], Any], moved: int, calls: int = 5, rounds: int = 3) -> float:
    """GB/s: median of `rounds`, each `calls` calls after one warm-up; `moved` bytes a call."""
    call()
    torch.cuda.synchronize()
    figures = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        figures.append(moved * calls / (time.perf_counter() - started) / 1e9)
    return round(statistics.median(figures), 1)


class DramReaders:
    """Threads that read distinct memory, each part twice, or again and again until `stop`."""

    def __init__(self, threads: int, endless: bool = False) -> None:
        self.parts = [torch.ones(DRAM_BYTES // 4 // threads) for _ in range(threads)]
        self.moved = [0] * threads
        self.endless, self.stopped = endless, threading.Event()
        self.threads = [threading.Thread(target=self._read, args=(i,)) for i in range(threads)]
        torch.set_num_threads(1)
        self.started = time.perf_counter()
        for thread in self.threads:
            thread.start()

    def _read(self, index: int) -> None:
        part = self.parts[index]
        size = part.numel() * part.element_size()
        while not (self.stopped.is_set() if self.endless else self.moved[index] >= 2 * size):
            part.sum()
            self.moved[index] += size

    def finish(self) -> float:
        """GB/s over all threads."""
        self.stopped.set()
        for thread in self.threads:
            thread.join()
        return round(sum(self.moved) / (time.perf_counter() - self.started) / 1e9, 1)


def main() -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    out: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0), "free_gib": round(free, 2)}
    host = torch.empty(BUFFER, dtype=torch.uint8).pin_memory()
    device = torch.empty(BUFFER, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(device)
    out["h2d"] = rate(lambda: device.copy_(host, non_blocking=True), BUFFER)
    out["d2h"] = rate(lambda: host.copy_(device, non_blocking=True), BUFFER)
    out["d2d_rw"] = rate(lambda: other.copy_(device), 2 * BUFFER, 20)

    words_in, words_out = host.view(torch.int64), device.view(torch.int64)
    grid = (triton.cdiv(words_in.numel(), 1024),)

    def zero_copy() -> None:
        gather[grid](words_in, words_out, words_in.numel(), BLOCK=1024)

    out["zero_copy"] = rate(zero_copy, BUFFER, 3)
    for size in EXPERTS:
        count = BUFFER // size // 2

        def chunks(size: int = size, count: int = count) -> None:
            for i in range(count):
                source = host[2 * i * size : (2 * i + 1) * size]
                device[i * size : (i + 1) * size].copy_(source, non_blocking=True)

        out[f"h2d_chunks_{size}"] = rate(chunks, count * size, 2)
    for threads in (1, 8, 14):
        out[f"dram_{threads}t"] = DramReaders(threads).finish()
    readers = DramReaders(14, endless=True)
    out["together_zero_copy"] = rate(zero_copy, BUFFER, 3)
    out["together_dram_14t"] = readers.finish()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    out["bf16_tflops"] = round(rate(lambda: a @ b, 2 * 8192**3, 10) / 1e3)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
