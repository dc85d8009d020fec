"""`ft doctor --fix`: the repairs that cannot lose anything, in a state folder that is ours.

Rights are tightened, missing folders made, the record of a daemon that is gone removed. No model, log or setting is
touched, and nothing at all in a folder of another program or user.
"""

from __future__ import annotations

from collections.abc import Iterator

from freetoken.daemon import native, store
from freetoken.daemon.doctor import read_home
from freetoken.daemon.doctor.facts import Folder
from freetoken.daemon.doctor.judge_home import PRIVATE, SECRET
from freetoken.daemon.store import Home
from freetoken.daemon.supervisor.logs import clean


def repair(home: Home) -> list[str]:
    """What was done, and what could not be done and why: a sentence each, without the name of the home folder."""
    found = read_home.folder(home)
    if not found.exists or found.foreign or not found.mine:
        return []
    done: list[str] = []
    for step in (_rights(home, found), _folders(home), _record(home)):
        try:
            done += step
        except OSError as error:
            done.append(f"not repaired: {error}")
    return [clean(line) for line in done]


def _rights(home: Home, found: Folder) -> Iterator[str]:
    for path, have, want in ((home.root, found.mode, PRIVATE), (home.token_file, found.token_mode, SECRET)):
        if have is not None and have != want:
            path.chmod(want)
            yield f"{path}: mode {have:04o} is now {want:04o}"


def _folders(home: Home) -> Iterator[str]:
    if not (home.root / store.MARK).exists():  # an empty folder: the first start makes it a state folder
        return
    for folder in (home.lock.parent, home.models, home.logs):
        if not folder.exists():
            folder.mkdir(mode=PRIVATE)
            yield f"{folder} was made"


def _record(home: Home) -> Iterator[str]:
    """Under the daemon's lock, so that one which starts at this moment keeps its record."""
    if not home.daemon_record.exists():
        return
    lock = native.FileLock.take(home.lock)
    if lock is None:
        return
    try:
        if read_home.record(home).state == "stale":
            home.daemon_record.unlink(missing_ok=True)
            yield f"{home.daemon_record} of a daemon that is gone was removed"
    finally:
        lock.release()
