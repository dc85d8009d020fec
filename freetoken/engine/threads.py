"""How torch's threads wait for each other; to be called before torch is imported. Imports nothing.

Does not know how many threads there are (assemble.py).
"""

from __future__ import annotations

import os

_SPINS = "1000"


def wait_politely() -> None:
    """Let a thread that waits for its team go to sleep after some microseconds instead of milliseconds.

    libgomp spins by default as long as there are as many processors as threads. On a desktop another program holds one
    of them now and then; the team then spins against its own missing member. With one busy program beside two threads
    on two cores a decode step took 3 to 40 times as long by default, 2 times with this. Quiet, it costs about 5 %.
    A value that the user has set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
