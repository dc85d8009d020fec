"""docs/troubleshooting.md from the table of checks. Pure; `python -m freetoken.daemon.doctor.render` prints it."""

from __future__ import annotations

from freetoken.daemon.doctor.table import CHECKS

_HEAD = """# Troubleshooting

Generated from `freetoken/daemon/doctor/table.py`. Start with `ft doctor`: it needs no daemon, no torch and no network,
and takes ten seconds at most. What failed comes first, each with what to do; the exit code is 1 if something failed.
`ft doctor --fix` makes the safe repairs (access rights, missing folders, the record of a daemon that is gone) and says
what it did. `ft doctor --json` prints `{checks, summary, fixed}` without tokens and without the name of your home
folder: fit for a report.

A check passes, warns, fails, is skipped (it does not apply here) or is inconclusive: the question had no answer in
time, which is not the same as a fault. The driver is asked in a process of its own: one that hangs is inconclusive.

| check | `id` | what it means, what to do |
|---|---|---|
"""


def troubleshooting_markdown() -> str:
    """The whole page."""
    return _HEAD + "".join(f"| {check.title} | `{check.id}` | {check.meaning} |\n" for check in CHECKS)


if __name__ == "__main__":
    print(troubleshooting_markdown(), end="")
