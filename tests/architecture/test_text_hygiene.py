"""What no file may carry: leftovers, paths of a machine, the address of a package registry."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = {".py", ".md", ".toml", ".sh", ".ts", ".tsx", ".json", ".js", ".css", ".html", ""}
FORBIDDEN = {
    "unfinished work": re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b"),
    "a registry's host": re.compile("|".join(["py" + r"pi\.org", "python" + r"hosted", r"registry\.npm" + "js"])),
    "a machine's path": re.compile(r"(?<![\w.])/(?:work|root)/[a-z]"),
}


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [ROOT / name for name in listed if Path(name).suffix in TEXT and (ROOT / name).is_file()]


def test_nothing_forbidden_is_written() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {kind}"
        for path in tracked()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        for kind, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]
    assert found == []
