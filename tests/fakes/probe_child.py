"""Stands in for a child that asks a driver: prints a document, hangs, crashes, floods or talks nonsense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def command(*arguments: str) -> tuple[str, ...]:
    """How a test starts it."""
    return (sys.executable, __file__, *arguments)


def main(kind: str, *arguments: str) -> None:
    match kind:
        case "say":
            print(arguments[0])
        case "hang":
            time.sleep(60)
        case "orphan":  # a grandchild keeps the pipe open; its pid goes into the file
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            with open(arguments[0], "w") as file:
                file.write(str(child.pid))
            time.sleep(60)
        case "crash":
            print("libnvidia: unexpected state", file=sys.stderr, flush=True)
            os.abort()
        case "fail":
            sys.exit("the card has fallen off the bus")
        case "flood":
            while True:
                sys.stdout.write("x" * 65536)
        case "environment":
            print(json.dumps({"key": os.environ.get("FREETOKEN_API_KEY", "")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
