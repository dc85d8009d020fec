"""One examination: all facts at once, each in a thread of its own, under one deadline; then every check.

A reader that fails or is late makes its fact unknown and no other. Nothing that is found is changed (repair.py does
that). Does not know what the facts mean.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.daemon import native
from freetoken.daemon.doctor import read_home, read_machine
from freetoken.daemon.doctor.facts import Facts
from freetoken.daemon.doctor.table import CHECKS, judge
from freetoken.daemon.doctor.verdict import Result, Status, Unknown
from freetoken.daemon.store import Home
from freetoken.daemon.supervisor.logs import clean
from freetoken.daemon.watch.probe import probe_gpus
from freetoken.settings.schema import Settings

DEADLINE_S = 9.0
Reader = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Report:
    """The results in the order of the table, made safe to show: no token, no home folder, no control characters."""

    results: tuple[Result, ...]

    @property
    def healthy(self) -> bool:
        return all(result.status is not Status.FAIL for result in self.results)

    @property
    def summary(self) -> dict[str, int]:
        """How many results there are of each status."""
        return {str(status): sum(result.status is status for result in self.results) for status in Status}


def examine(settings: Settings, deadline_s: float = DEADLINE_S) -> Report:
    """Look at everything. Takes at most `deadline_s` and a moment."""
    home = Home(settings.home)
    facts = gather(readers(settings), deadline_s)
    secrets = _secrets(home, settings)
    return Report(tuple(_redacted(judge(check, facts), secrets) for check in CHECKS))


def readers(settings: Settings) -> dict[str, Reader]:
    """THE table: field of Facts -> who reads it."""
    home = Home(settings.home)
    return {
        "gpus": probe_gpus,
        "pins": read_machine.pins,
        "nvidia_devices": native.nvidia_devices,
        "system": native.system_name,
        "memory": read_machine.memory,
        "commit": native.commit_limit,
        "instructions": native.cpu_features,
        "compilers": read_machine.compilers,
        "kernels": read_machine.kernels,
        "torch": read_machine.torch,
        "programs": read_machine.programs,
        "installed": lambda: read_machine.installed(home),
        "disk_free": lambda: read_machine.disk_free(home),
        "folder": lambda: read_home.folder(home),
        "port": lambda: read_home.port(home, settings.host, settings.port),
        "record": lambda: read_home.record(home),
        "models": lambda: read_home.models(home),
        "past": lambda: read_home.past(home),
    }


def gather(asked: Mapping[str, Reader], deadline_s: float) -> Facts:
    """Everything that was known at the deadline. Threads that are late are left behind: they end with the process."""
    until = time.monotonic() + deadline_s
    late = Unknown(f"there was no answer within {deadline_s:g} s")
    found: dict[str, Any] = {}

    def read(name: str, reader: Reader) -> None:
        try:
            found[name] = reader()
        except Exception as error:  # noqa: BLE001 - it becomes the reason why this fact is not known
            found[name] = Unknown(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=read, args=pair, daemon=True) for pair in asked.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return Facts(**{name: found.get(name, late) for name in asked})


def _secrets(home: Home, settings: Settings) -> tuple[str, ...]:
    """What may be in no report."""
    try:
        token = home.token_file.read_text("utf-8", "replace").strip()
    except OSError:
        token = ""
    return tuple(secret for secret in (token, settings.api_key) if secret)


def _redacted(result: Result, secrets: tuple[str, ...]) -> Result:
    def safe(value: Any) -> Any:
        if isinstance(value, str):
            for secret in secrets:
                value = value.replace(secret, "[secret]")
            return clean(value)
        if isinstance(value, Mapping):
            return {safe(name): safe(item) for name, item in value.items()}
        return [safe(item) for item in value] if isinstance(value, list | tuple) else value

    fixes = tuple(safe(fix) for fix in result.fixes)
    return Result(result.id, result.status, result.title, safe(result.detail), safe(result.evidence), fixes)
