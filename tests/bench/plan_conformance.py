"""What the plan promised beside what the engine took: predicted and measured peak, line by line.

    plan_conformance.py --model PATH [--device cpu|cuda] [--limit 6GiB --limit 8GiB ...] [--num-tokens N] [--json]

For each limit (VRAM on a GPU, free memory on a CPU; none: what is free) a process of its own plans, loads, fills the KV
pool with prompts of all running requests in the plan's chunks, decodes, and reports its peak. On a GPU the peak is the
card's own count (NVML) less what was held before; on a CPU the most resident memory of the process's own (mapped weight
files count for nobody), looked at every 2 ms. The claim: predicted >= measured, and at most 5 % more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

DECODE = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit", action="append", default=[])
    parser.add_argument("--num-tokens", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(asyncio.run(measure(args))))
        return
    rows = [_child(args, limit) for limit in args.limit or [""]]
    if args.json:
        print(json.dumps(rows))
    else:
        _print(rows)


def _child(args: argparse.Namespace, limit: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", str(args.model), "--device", args.device, "--one", limit]
    command += ["--num-tokens", str(args.num_tokens)] if args.num_tokens else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1800)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    from freetoken.engine.threads import wait_politely

    wait_politely()
    from freetoken.catalog.checkpoint import open_checkpoint
    from freetoken.engine.assemble import assemble
    from freetoken.engine.inproc import InprocBackend
    from freetoken.plan.choices import Requested
    from freetoken.plan.placement import make_plan

    limit = args.one
    meter = CudaMeter(limit) if args.device == "cuda" else CpuMeter(limit)
    plan = make_plan(open_checkpoint(args.model), Requested(num_tokens=args.num_tokens), meter.machine())
    row: dict[str, Any] = {
        "limit": limit or "none",
        "verdict": plan.verdict,
        "code": plan.code,
        "predicted": {line.line: int(line.bytes) for line in plan.ledger},
        "predicted_total": int(plan.total),
    }
    if plan.resolved is None:
        return row
    engine = assemble(args.model, plan.resolved, lambda *_: None, lambda: False)
    async with InprocBackend(engine.runner, plan.resolved) as backend:
        vocab, page = engine.spec.embed.vocab, plan.resolved.page_size
        room = plan.resolved.num_pages // plan.resolved.max_running_requests * page - page
        length = min(room, plan.resolved.max_seq_len) - DECODE
        requests = range(plan.resolved.max_running_requests)
        await asyncio.gather(*(_generate(backend, number, length, vocab) for number in requests))
    peak = meter.peak()
    measured = {name: engine.measured[name] for name in ("weights_bytes", "kv_bytes")}
    return row | {"measured": measured, "peak": peak, "slack": plan.total / peak - 1}


async def _generate(backend: Any, seed: int, length: int, vocab: int) -> None:
    from freetoken.core.events import Failed
    from freetoken.core.types import GenerateRequest, SamplingParams

    rng = random.Random(seed)
    prompt = tuple(rng.randrange(vocab) for _ in range(length))
    sampling = SamplingParams(temperature=0.0, max_tokens=DECODE, ignore_eos=True)
    async for event in backend.generate(GenerateRequest(f"r{seed}", prompt, sampling)):
        if isinstance(event, Failed):
            raise RuntimeError(event.detail)


class CpuMeter:
    """The most resident memory of this process's own, by looking often."""

    def __init__(self, limit: str) -> None:
        self._limit = limit
        self._most = 0
        threading.Thread(target=self._look, daemon=True).start()

    def machine(self) -> Any:
        from freetoken.core.units import Bytes
        from freetoken.plan.hardware import snapshot

        now = snapshot()
        return replace(now, ram_free=min(now.ram_free, Bytes.parse(self._limit))) if self._limit else now

    def peak(self) -> int:
        return self._most

    def _look(self) -> None:
        import psutil

        process = psutil.Process()
        while True:
            memory = process.memory_info()
            self._most = max(self._most, memory.rss - getattr(memory, "shared", 0))
            time.sleep(0.002)


class CudaMeter:
    """The card's count of what is used, less what was used before this process touched it."""

    def __init__(self, limit: str) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._card = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._limit = limit
        self._before = self._nvml.nvmlDeviceGetMemoryInfo(self._card).used

    def machine(self) -> Any:
        """The card with everything beyond the limit taken as held by others."""
        from freetoken.core.units import Bytes
        from freetoken.plan.hardware import described, snapshot

        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._card)
        free = min(memory.free, Bytes.parse(self._limit)) if self._limit else memory.free
        return described(Bytes(free), None, snapshot())

    def peak(self) -> int:
        """Exact where the allocator only grows, as it does between load and here."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._card).used - self._before)


def _print(rows: list[dict[str, Any]]) -> None:
    from freetoken.core.units import Bytes

    print(f"{'limit':>8}  {'verdict':<13} {'predicted':>11} {'measured':>11} {'slack':>7}  weights, kv")
    for row in rows:
        if "peak" not in row:
            print(f"{row['limit']:>8}  {row['verdict']:<13} {Bytes(row['predicted_total'])!s:>11} {row['code']}")
            continue
        lines, seen = row["predicted"], row["measured"]
        parts = ", ".join(
            f"{Bytes(lines[line])} / {Bytes(seen[name])}"
            for line, name in (("weights", "weights_bytes"), ("kv_pages", "kv_bytes"))
        )
        total, peak = Bytes(row["predicted_total"]), Bytes(row["peak"])
        print(f"{row['limit']:>8}  {row['verdict']:<13} {total!s:>11} {peak!s:>11} {row['slack']:>7.1%}  {parts}")


if __name__ == "__main__":
    main()
