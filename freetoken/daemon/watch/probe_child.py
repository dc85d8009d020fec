"""Prints what NVIDIA's management library says, as one JSON object: `python -m freetoken.daemon.watch.probe_child`.

Runs in a process of its own because a driver may hang or crash. Errors are data: {"installed", "reason"} where there is
no usable driver, else {"driver", "cuda", "cards"}, whose members are those of cards.py. Judges nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psutil
import pynvml as nvml


def main() -> None:
    """One document on stdout; the exit code is 0 whatever the driver says."""
    print(json.dumps(_document()))


def _document() -> dict[str, Any]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        missing = isinstance(error, nvml.NVMLError_LibraryNotFound)
        return {"installed": not missing, "reason": str(error)}
    silent: dict[str, str] = {}
    version = _tried(silent, "cuda", nvml.nvmlSystemGetCudaDriverVersion)  # 13020 is 13.2
    return {
        "driver": _tried(silent, "driver", nvml.nvmlSystemGetDriverVersion),
        "cuda": [version // 1000, version % 1000 // 10] if version else None,
        "cards": [_card(index) for index in range(nvml.nvmlDeviceGetCount())],
    }


def _card(index: int) -> dict[str, Any]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = nvml.nvmlDeviceGetUUID(handle)
    except nvml.NVMLError as error:  # fallen off the bus, or not ours to use
        return {"uuid": f"GPU {index}", "problem": str(error)}
    silent: dict[str, str] = {}

    def ask(name: str, question: Callable[..., Any], *arguments: Any) -> Any:
        return _tried(silent, name, question, handle, *arguments)

    memory = ask("memory", nvml.nvmlDeviceGetMemoryInfo)
    utilisation = ask("utilisation", nvml.nvmlDeviceGetUtilizationRates)
    return {
        "uuid": uuid,
        "name": ask("name", nvml.nvmlDeviceGetName),
        "compute_capability": ask("compute_capability", nvml.nvmlDeviceGetCudaComputeCapability),
        "vram_total": memory.total if memory else None,
        "vram_free": memory.free if memory else None,
        "holders": _holders(ask),
        "link": {
            "generation": ask("generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration),
            "width": ask("width", nvml.nvmlDeviceGetCurrPcieLinkWidth),
            "max_generation": ask("max_generation", nvml.nvmlDeviceGetMaxPcieLinkGeneration),
            "max_width": ask("max_width", nvml.nvmlDeviceGetMaxPcieLinkWidth),
            "card_generation": ask("card_generation", nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration),
        },
        "clocks": {
            "memory_mhz": ask("memory_mhz", nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM),
            "memory_bits": ask("memory_bits", nvml.nvmlDeviceGetMemoryBusWidth),
            "sm_mhz": ask("sm_mhz", nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            "cores": ask("cores", nvml.nvmlDeviceGetNumGpuCores),
        },
        "display": _as_bool(ask("display", nvml.nvmlDeviceGetDisplayActive)),
        "temperature_c": ask("temperature", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        "utilisation": utilisation.gpu if utilisation else None,
        "silent": silent,
    }


def _holders(ask: Callable[..., Any]) -> list[dict[str, Any]]:
    """Each process once: one that draws and computes is in both lists."""
    found: dict[int, int | None] = {}
    for name, question in (
        ("compute", nvml.nvmlDeviceGetComputeRunningProcesses),
        ("graphics", nvml.nvmlDeviceGetGraphicsRunningProcesses),
    ):
        for process in ask(f"{name} processes", question) or ():
            found[process.pid] = max(found.get(process.pid) or 0, process.usedGpuMemory or 0) or None
    return [{"pid": pid, "name": _name(pid), "bytes": size} for pid, size in found.items()]


def _name(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:  # it has ended, or is in another container
        return None


def _as_bool(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _tried(silent: dict[str, str], name: str, question: Callable[..., Any], *arguments: Any) -> Any:
    """The answer; None where this driver or card has none, noted in `silent`."""
    try:
        return question(*arguments)
    except nvml.NVMLError as error:
        silent[name] = str(error)
        return None


if __name__ == "__main__":
    main()
