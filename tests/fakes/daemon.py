"""The real daemon process with the fake engine: `python tests/fakes/daemon.py [daemon's arguments]`.

FAKE_VERSION makes it one of another version; FAKE_PLANTED=recorder|flood|clock plants something in it (planted.py).
FAKE_WORKER is another program of this folder as its engine.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from freetoken.daemon import main

WORKER = (sys.executable, str(Path(__file__).with_name(os.environ.get("FAKE_WORKER", "worker.py"))))


def plant(what: str) -> None:
    from tests.fakes import planted

    {"recorder": planted.plant_recorder, "flood": planted.plant_flood, "clock": planted.plant_clock}[what]()


if __name__ == "__main__":
    main.__version__ = os.environ.get("FAKE_VERSION", main.__version__)
    if "FAKE_PLANTED" in os.environ:
        plant(os.environ["FAKE_PLANTED"])
    sys.exit(main.main(worker=WORKER))
