"""The real daemon process with the fake engine: `python tests/fakes/daemon.py [daemon's arguments]`.

FAKE_VERSION makes it one of another version.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from freetoken.daemon import main

WORKER = (sys.executable, str(Path(__file__).with_name("worker.py")))

if __name__ == "__main__":
    main.__version__ = os.environ.get("FAKE_VERSION", main.__version__)
    sys.exit(main.main(worker=WORKER))
