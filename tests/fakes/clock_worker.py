"""tests.fakes.worker, which also sends its clock in log frames, fifty times a second (tests/bench/daemon_load.py)."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fakes.worker import Worker

EVERY_S = 0.02


class ClockWorker(Worker):
    async def run(self) -> None:
        self.ticking = asyncio.create_task(self.tick())
        await super().run()

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.send("log", level="info", line=f"clock {time.time()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--runtime", type=Path, required=True)
    asyncio.run(ClockWorker(parser.parse_args().runtime).run())
