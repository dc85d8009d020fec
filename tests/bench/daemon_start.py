"""How soon the daemon answers after the command, and what it holds idle. Best and median of the runs.

    daemon_start.py [--runs 5]

Each run starts `python -m freetoken.daemon.main` with an empty state folder and asks for /live until it answers. The
resident size is read two seconds later, when the whole application has been imported.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import psutil


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/live", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def once() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as home:
        port = free_port()
        command = [sys.executable, "-m", "freetoken.daemon.main", "--port", str(port)]
        started = time.perf_counter()
        daemon = subprocess.Popen(command, env=os.environ | {"FREETOKEN_HOME": home}, stderr=subprocess.DEVNULL)
        try:
            while not answers(f"http://127.0.0.1:{port}"):
                if time.perf_counter() - started > 30 or daemon.poll() is not None:
                    raise SystemExit("the daemon did not answer")
                time.sleep(0.005)
            listening = time.perf_counter() - started
            time.sleep(2)
            resident = psutil.Process(daemon.pid).memory_info().rss
        finally:
            daemon.terminate()
            daemon.wait(30)
    return {"listening_s": listening, "idle_mib": resident / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = [once() for _ in range(parser.parse_args().runs)]
    figures = {
        f"{name}_{what}": round(of([run[name] for run in runs]), 3)
        for name in runs[0]
        for what, of in (("best", min), ("median", statistics.median))
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
