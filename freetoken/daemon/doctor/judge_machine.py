"""Checks of the machine and of the installation: memory, processor, compiler, kernels, torch, commands. Pure.

Does not know how the facts were found.
"""

from __future__ import annotations

from pathlib import PurePath

from freetoken.core.units import Bytes
from freetoken.daemon.doctor.facts import Facts
from freetoken.daemon.doctor.verdict import Undecided, Verdict, failed, known, passed, skipped, warned

RAM_LEAST = Bytes(1 << 30)  # below this nothing can be loaded
RAM_SHARE = 0.25  # of the memory: below this others hold most of it
COMMIT_SHARE = 0.1  # of the commit limit left
DISK_LEAST, DISK_TIGHT = Bytes(1 << 30), Bytes(20 << 30)
FAST = ("avx512f", "avx2", "asimd")  # best first
REINSTALL = "Run the installer again"


def ram(facts: Facts) -> Verdict:
    """What may be used, by the container's limit where that is lower."""
    memory = known(facts.memory)
    limited = memory.limit is not None and memory.limit < memory.total
    total = memory.limit if limited and memory.limit is not None else memory.total
    free = Bytes(min(memory.available, total))
    evidence = {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "limit_bytes": memory.limit,
        "lock_limit_bytes": memory.lock_limit,
    }
    of = f"a limit of {total} (the machine has {memory.total})" if limited else str(total)
    detail = f"{free} of {of} can be used."
    fixes = ["Close other programs"] + ["Raise the memory limit of the container or service"] * limited
    if free < RAM_LEAST:
        return failed(detail, *fixes, **evidence)
    if free < RAM_SHARE * total:
        return warned(detail, *fixes, **evidence)
    return passed(detail, **evidence)


def commit(facts: Facts) -> Verdict:
    """Windows (and Linux, if told so) promises only as much memory as RAM and page files hold."""
    left = known(facts.commit)
    if left is None:
        return skipped(f"{known(facts.system)} here does not limit what it promises")
    detail = f"{left.free} of {left.limit} can still be promised to programs."
    fix = (
        "Let Windows manage the page file's size, or make it larger (System > Advanced > Performance > Virtual memory)"
    )
    if known(facts.system) != "Windows":
        fix = "Set vm.overcommit_memory to 0, or add swap"
    evidence = {"limit_bytes": left.limit, "free_bytes": left.free}
    if left.free < RAM_LEAST:
        return failed(detail, fix, **evidence)
    if left.free < COMMIT_SHARE * left.limit:
        return warned(detail, fix, **evidence)
    return passed(detail, **evidence)


def system(facts: Facts) -> Verdict:
    """Linux under Windows has its own limits."""
    name = known(facts.system)
    if name == "WSL":
        what = "This is WSL: it gets half of the memory by default and pins about half of that"
        fixes = ("Raise memory= in .wslconfig, then run `wsl --shutdown`", "Keep models in WSL's own disk, not in /mnt")
        return warned(f"{what}.", *fixes, system=name)
    if name not in ("Linux", "Windows", "macOS"):
        return failed(f"{name} is not supported.", "Use Linux, Windows or macOS", system=name)
    return passed(f"{name}.", system=name)


def instructions(facts: Facts) -> Verdict:
    """What the processor's vector units can do."""
    found = known(facts.instructions)
    if found is None:
        raise Undecided("the system does not say what the processor can do")
    best = [name for name in FAST if name in found]
    evidence = {"vector": sorted(name for name in found if name.startswith(("avx", "amx", "asimd", "sse4")))}
    if best:
        return passed(f"The processor has {best[0]}.", **evidence)
    if "sse4_1" in found or "avx" in found:
        return warned("The processor has no AVX2: models on the CPU are slow.", "Use a GPU", **evidence)
    return failed("The processor has no vector instructions that torch needs.", "Use another machine", **evidence)


def compiler(facts: Facts) -> Verdict:
    """Only for kernels that are built on this machine; none is today."""
    found = known(facts.compilers)
    if not found:
        return warned("No C++ compiler was found; nothing needs one now.", "Install g++ or clang to build kernels here")
    return passed(f"{found[0]}.", compilers=list(found))


def kernels(facts: Facts) -> Verdict:
    """The package with the kernels is half of the installation."""
    if not known(facts.kernels):
        return failed("freetoken_kernels is not installed.", REINSTALL)
    return passed("freetoken_kernels is installed.")


def torch(facts: Facts) -> Verdict:
    """The engine needs it; the daemon and this check do not."""
    found = known(facts.torch)
    if found is None:
        return failed("torch is not installed: no model can run.", REINSTALL)
    built = f"with CUDA {found.cuda}" if found.cuda else "for the CPU"
    return passed(f"torch {found.version}, built {built}.", version=found.version, cuda=found.cuda)


def command(facts: Facts) -> Verdict:
    """Other programs are called `ft` too, the public FreeToken 0.2.1 among them."""
    found = known(facts.programs)
    evidence = {"programs": [program.path for program in found]}
    if not found:
        return warned("ft is not on the search path.", "Add the folder of this ft to PATH", **evidence)
    if found[0].ours:
        return passed(f"ft is {found[0].path}.", **evidence)
    mine = next((program.path for program in found if program.ours), None)
    fix = f"Put {PurePath(mine).parent} first in PATH" if mine else "Add the folder of this ft to PATH, first"
    return failed(f"Another program answers to ft: {found[0].path}.", fix, **evidence)


def installation(facts: Facts) -> Verdict:
    """An installation that was interrupted leaves an environment that does not run."""
    found = known(facts.installed)
    if found is None:
        return skipped("no installer made an environment in the state folder")
    if found.problem is None:
        return passed(f"{found.folder} runs.", folder=found.folder)
    return failed(
        f"The environment {found.folder} does not run: {found.problem}.",
        f"Move {found.folder} away, then run the installer again",
        folder=found.folder,
    )


def disk(facts: Facts) -> Verdict:
    """Models and logs need room where the state folder is."""
    free = known(facts.disk_free)
    fix = "Free some space, or set FREETOKEN_HOME to a folder on another disk"
    if free < DISK_LEAST:
        return failed(f"Only {free} are free where the state folder is.", fix, free_bytes=free)
    if free < DISK_TIGHT:
        return warned(f"{free} are free where the state folder is: too little for most models.", fix, free_bytes=free)
    return passed(f"{free} are free where the state folder is.", free_bytes=free)
