"""Checks of the state folder, the daemon, its port, the models and the last failure. Pure.

Does not know how the facts were found.
"""

from __future__ import annotations

from freetoken.daemon.doctor.facts import Facts, Model
from freetoken.daemon.doctor.verdict import Undecided, Verdict, failed, known, passed, skipped, warned

PRIVATE, SECRET = 0o700, 0o600
REPAIR = "ft doctor --fix"
BAD = ("partial", "corrupt", "missing")


def folder(facts: Facts) -> Verdict:
    """It must be ours, and nobody else may read the token in it."""
    found = known(facts.folder)
    evidence = {"path": found.path, "mode": f"{found.mode:04o}", "missing": list(found.missing)}
    if not found.exists:
        return passed(f"{found.path} will be made at the first start.", path=found.path)
    if found.foreign:
        return failed(found.foreign, f"Move {found.path} away, or set FREETOKEN_HOME to another folder", **evidence)
    if not found.mine:
        return failed(f"{found.path} belongs to another user.", "Set FREETOKEN_HOME to a folder of yours", **evidence)
    loose = [
        f"{name} has mode {mode:04o} instead of {want:04o}"
        for name, mode, want in (("it", found.mode, PRIVATE), ("its token", found.token_mode or SECRET, SECRET))
        if mode != want
    ]
    if loose:
        return failed(f"Other users may read {found.path}: {', '.join(loose)}.", REPAIR, **evidence)
    if found.missing:
        return warned(f"{found.path} lacks {', '.join(found.missing)}.", REPAIR, **evidence)
    return passed(f"{found.path} is ours and private.", **evidence)


def port(facts: Facts) -> Verdict:
    """Free, ours, or in whose hands."""
    found = known(facts.port)
    evidence = {"port": found.number, "state": found.state, "holder": found.holder}
    other = "Choose another --port for `ft daemon start`"
    match found.state:
        case "free":
            return passed(f"Port {found.number} is free.", **evidence)
        case "ours":
            return passed(f"Our daemon listens on port {found.number}.", **evidence)
        case "other home":
            what = f"Port {found.number} is held by a FreeToken daemon of another state folder ({found.holder})"
            return warned(f"{what}.", "Set FREETOKEN_HOME to that folder, or stop that daemon", other, **evidence)
        case "reserved":
            why = found.holder or "excluded port range; not in use by a program"
            reserved = f"The system keeps port {found.number} for itself ({why})."
            return failed(reserved, other, "On Windows: netsh int ipv4 show excludedportrange tcp", **evidence)
        case _:
            what = f"Port {found.number} is held by {found.holder or 'another program'}, which is no FreeToken daemon"
            return warned(f"{what}; the daemon takes the next free one.", "Stop that program", other, **evidence)


def record(facts: Facts) -> Verdict:
    """A daemon is believed by its pid, its start time and its own answer, together."""
    found = known(facts.record)
    evidence = {"state": found.state, "pid": found.pid, "url": found.url}
    if found.state == "none":
        return passed("No daemon runs, and none left a record.", **evidence)
    if found.state == "running":
        return passed(f"The daemon answers at {found.url} (pid {found.pid}).", **evidence)
    if found.state == "stale":
        return warned("runtime/daemon.json names a daemon that is gone.", REPAIR, **evidence)
    stop = f"End process {found.pid}, then ft daemon start"
    return failed(f"The daemon (pid {found.pid}) runs but does not answer at {found.url}.", stop, **evidence)


def models(facts: Facts) -> Verdict:
    """Every model's files, as far as their headers tell."""
    found = known(facts.models)
    if not found:
        return skipped("there is no model on this machine yet")
    evidence = {model.id: _state(model) for model in found}
    bad = [model for model in found if model.state in BAD]
    unread = [model for model in found if model.state == "unread"]
    if bad:
        what = "; ".join(f"{model.id} is {_state(model)}" for model in bad)
        return failed(f"{len(bad)} of {len(found)} models cannot be loaded: {what}.", *map(_again, bad), **evidence)
    if unread:
        raise Undecided(f"not all models could be read: {'; '.join(f'{m.id} {m.detail}'.strip() for m in unread)}")
    strange = [model for model in found if model.state == "unsupported"]
    if strange:
        what = "; ".join(f"{model.id}: {model.detail}" for model in strange)
        return warned(f"This version cannot run {what}.", "Use another variant of the model", **evidence)
    return passed(f"{len(found)} models, all complete.", **evidence)


def last_failure(facts: Facts) -> Verdict:
    """What the daemon noted when an engine or a load last failed."""
    past = known(facts.past)
    if past.failure is None:
        return passed("No engine and no load has failed.")
    problem = past.failure.problem
    fixes = tuple(str(fix.get("title")) for fix in problem.get("fixes", ()) if isinstance(fix, dict))
    code, numbers = problem.get("code"), problem.get("numbers")
    evidence = {"time": past.failure.time, "model": past.failure.model, "code": code, "numbers": numbers}
    what = f"{past.failure.model or 'A model'} failed at {past.failure.time}: {problem.get('detail')}"
    if past.loaded_since and past.loaded_since > past.failure.time:
        return passed(f"{what} A load went well after that.", **evidence)
    return warned(what, *fixes, **evidence)


def _state(model: Model) -> str:
    return f"{model.state} ({model.detail})" if model.detail else model.state


def _again(model: Model) -> str:
    if model.id.startswith("local/"):
        return f"Bring the files of {model.id} back, or load it from where they are now"
    return f"ft pull {model.id}"
