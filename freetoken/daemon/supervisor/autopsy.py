"""Why an engine process ended: from exit code, last lines and memory to one typed error. Pure.

Does not know processes; child.py gathers the facts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from freetoken.core.errors import EngineDied, EngineError, EngineStartFailed, Number, OutOfMemory
from freetoken.core.units import Bytes

LOW_MEMORY = 0.05  # of the machine: below this a SIGKILL that nobody sent was most likely the kernel's
LAST_LINES = 20

# the words of CUDA's runtime, of torch, of NVML and of the driver
_GPU_LOST = re.compile(
    r"GPU is lost|fallen off the bus|CUDA_ERROR_(DEVICE_UNAVAILABLE|NO_DEVICE|SYSTEM_NOT_READY)"
    r"|CUDA(-capable devices are busy or unavailable|[ :]+(error: )?unknown error)"
    r"|no CUDA-capable device is detected|uncorrectable ECC error|\bXid\b.*\b(48|79|119)\b",
    re.IGNORECASE,
)
_CUDA = re.compile(r"CUDA error: .{1,200}|CUDA_ERROR_\w+|CUDA out of memory.{0,200}|CUBLAS_STATUS_\w+")


class GpuLost(EngineDied):
    """The driver no longer has the GPU: the computer slept, the driver was reset, the card or its power failed."""

    code, title = "GPU_LOST", "The GPU is gone"


@dataclass(frozen=True, slots=True)
class Death:
    """What was left."""

    exit_code: int | None  # negative: the signal; None: unknown (another daemon had started it)
    signal: str | None  # its name
    last_lines: tuple[str, ...]
    loading: bool  # it had not said ready
    kernel_oom_kills: int  # by the kernel's count, while it ran
    least_free: Bytes  # memory available at the last look
    total: Bytes
    hung: str | None = None  # why we ended it, as the rest of "The engine process ..."

    @property
    def gpu_lost(self) -> str | None:
        """The last line that says that the driver lost the GPU."""
        return next((line.strip() for line in reversed(self.last_lines) if _GPU_LOST.search(line)), None)

    @property
    def cuda_error(self) -> str | None:
        """The last thing that the CUDA libraries complained about."""
        found = (_CUDA.search(line) for line in reversed(self.last_lines))
        return next((match[0].strip().rstrip(".") for match in found if match), None)

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel ended it for lack of memory: known by the kernel's count, else guessed."""
        if self.hung:
            return False
        low = self.least_free < LOW_MEMORY * self.total
        if self.exit_code is None:
            return self.kernel_oom_kills > 0
        return self.signal == "SIGKILL" and (self.kernel_oom_kills > 0 or low)


def explain(death: Death) -> EngineError:
    """One sentence with the numbers, and what to do."""
    numbers: dict[str, Number] = {"oom_killed": int(death.oom_killed)}
    if death.exit_code is not None:
        numbers["exit_code"] = death.exit_code
    if death.signal:
        numbers["signal"] = death.signal
    if death.cuda_error:
        numbers["cuda_error"] = death.cuda_error
    when = " while it loaded the model" if death.loading else ""
    return _kind(death)(f"The engine process {_cause(death, when)}.", numbers=numbers, fixes=_fixes(death))


def _kind(death: Death) -> type[EngineError]:
    if death.gpu_lost:
        return GpuLost
    if death.cuda_error and "out of memory" in death.cuda_error.lower():
        return OutOfMemory
    return EngineStartFailed if death.loading and death.exit_code is not None and not death.signal else EngineDied


def _cause(death: Death, when: str) -> str:
    if death.hung:
        return f"{death.hung}{when} and was ended"
    if death.gpu_lost:
        return f"lost its GPU{when}; {death.gpu_lost[:300]}"
    if death.oom_killed:
        free = f"{death.least_free} of {death.total} were free"
        return f"was ended by the system{when} because memory ran out (SIGKILL; {free})"
    if death.signal == "SIGKILL":
        return f"was killed from outside{when} (SIGKILL)"
    if death.signal:
        return f"crashed{when} ({death.signal})" + _last_words(death)
    if death.exit_code is None:
        return f"is gone{when}; an earlier daemon had started it, so its exit code is not known" + _last_words(death)
    return f"ended by itself{when} (exit code {death.exit_code})" + _last_words(death)


def _last_words(death: Death) -> str:
    """What CUDA complained about, else the last line that says something: of a traceback that is the exception."""
    if death.cuda_error:
        return f"; CUDA says: {death.cuda_error}"
    said = next((line.strip() for line in reversed(death.last_lines) if line.strip()), "")
    return f"; its last words: {said[:300]}" if said else ""


def _fixes(death: Death) -> tuple[str, ...]:
    if death.gpu_lost:
        return (
            "See whether nvidia-smi lists the GPU; if it does not, restart the computer",
            "Load the model again",
        )
    if death.oom_killed:
        return (
            "Close other programs, then load again",
            "Load with a smaller context (--num-tokens)",
            "Load with less of the memory (--memory-ratio)",
        )
    return ("Load the model again", "Look into logs/engine.log in the state folder")
