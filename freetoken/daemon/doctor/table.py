"""THE table of checks: what each is called, what it means and who judges it. Pure.

docs/troubleshooting.md is generated from it. Does not know how the facts are found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from freetoken.daemon.doctor import judge_gpu, judge_home, judge_machine
from freetoken.daemon.doctor.facts import Facts
from freetoken.daemon.doctor.verdict import Result, Status, Undecided, Verdict


@dataclass(frozen=True, slots=True)
class Check:
    """`meaning` is a sentence or two for people: what is looked at, and what to do where it is not as it should be."""

    id: str
    title: str
    meaning: str
    judge: Callable[[Facts], Verdict]


CHECKS = (
    Check(
        "driver",
        "NVIDIA driver",
        "A driver that answers. Without one models run on the CPU. A card that does not answer has been lost (sleep, a "
        "reset, power): restart.",
        judge_gpu.driver,
    ),
    Check(
        "cuda",
        "CUDA of torch",
        "The driver must run the CUDA version that torch was built with: CUDA 13 needs driver 580 or newer.",
        judge_gpu.cuda,
    ),
    Check(
        "capability",
        "Compute capability",
        "Cards from 8.0 on (RTX 30 series, A100) run the GPU kernels; older ones have no bf16.",
        judge_gpu.capability,
    ),
    Check(
        "vram",
        "GPU memory",
        "Free memory of each card and the programs that hold the rest. Close them before you load a model.",
        judge_gpu.vram,
    ),
    Check(
        "pcie",
        "PCIe link",
        "Lanes and generation between card and memory: experts are fetched through it. Fewer lanes than the card has "
        "mean another slot or a riser. A lower generation on an idle card is power saving, no fault.",
        judge_gpu.pcie,
    ),
    Check(
        "pin_limit",
        "Pinned memory",
        "Memory that the driver can read directly. Up to 4 GiB are pinned, copied to the card and back, compared and "
        "freed. Windows and WSL pin about half of the memory.",
        judge_gpu.pin_limit,
    ),
    Check(
        "ram",
        "Memory",
        "Memory that can be used now. The limit of a container or service counts where it is lower.",
        judge_machine.ram,
    ),
    Check(
        "commit",
        "Commit limit",
        "Windows promises no more memory than RAM and page file hold; error 1455 says that the page file is too small.",
        judge_machine.commit,
    ),
    Check(
        "system",
        "Operating system",
        "WSL gets half of the machine's memory unless .wslconfig says otherwise, and reads /mnt slowly.",
        judge_machine.system,
    ),
    Check(
        "instructions",
        "Processor",
        "Vector instructions: AVX2 or better on a PC.",
        judge_machine.instructions,
    ),
    Check("compiler", "C++ compiler", "Only needed to build kernels on this machine.", judge_machine.compiler),
    Check("kernels", "Kernels", "The kernel package is part of the installation.", judge_machine.kernels),
    Check("torch", "torch", "The engine runs on it. Its version is read, not imported.", judge_machine.torch),
    Check(
        "installation",
        "Installation",
        "The environment that the installer makes in the state folder must run. An interrupted installation leaves one "
        "that does not: move it away and install again.",
        judge_machine.installation,
    ),
    Check(
        "command",
        "The ft command",
        "The first ft on PATH should be ours; the public FreeToken 0.2.1 uses the same name.",
        judge_machine.command,
    ),
    Check("disk", "Disk space", "Room where the state folder is; models take tens of GiB.", judge_machine.disk),
    Check(
        "folder",
        "State folder",
        "It holds the token, so only you may read it. A folder without freetoken-home.json belongs to another program "
        "and is not touched.",
        judge_home.folder,
    ),
    Check(
        "port",
        "Port",
        "Free, ours, or held by a stranger. Windows reserves ranges (error 10013): choose another port.",
        judge_home.port,
    ),
    Check(
        "record",
        "Daemon",
        "A daemon counts as running if its process runs, began when the record says and answers with its own id.",
        judge_home.record,
    ),
    Check(
        "models",
        "Models",
        "Every model's headers are read and its files measured. A partial or corrupt one must be pulled again.",
        judge_home.models,
    ),
    Check(
        "last_failure",
        "Last failure",
        "Why an engine or a load last failed, as the daemon noted it in logs/last-failure.json.",
        judge_home.last_failure,
    ),
)


def judge(check: Check, facts: Facts) -> Result:
    """The check's result. Whatever goes wrong inside makes it inconclusive and leaves the others alone."""
    try:
        verdict = check.judge(facts)
    except Undecided as undecided:
        verdict = Verdict(Status.INCONCLUSIVE, f"Not known: {undecided}.")
    except Exception as error:  # noqa: BLE001 - reported as the result; the other checks go on
        verdict = Verdict(Status.INCONCLUSIVE, f"The check itself failed: {type(error).__name__}: {error}.")
    return Result(check.id, verdict.status, check.title, verdict.detail, verdict.evidence, verdict.fixes)
