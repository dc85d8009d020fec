"""Writes the contract that apps are built from: `python -m freetoken.daemon.contract app-bridge/contract`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from freetoken.daemon.contract import event_schema, openapi


def documents() -> dict[str, str]:
    """File name to content."""
    found = {"control.openapi.json": openapi.document(), "events.schema.json": event_schema.document()}
    return {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="freetoken.daemon.contract", description=__doc__)
    parser.add_argument("folder", type=Path, help="Where the two files are.")
    folder: Path = parser.parse_args().folder
    for name, text in documents().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
