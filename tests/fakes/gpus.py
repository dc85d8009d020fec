"""Canned documents of the GPU probe. H200 is what a real card said; the others follow reports and data sheets."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30

H200: dict[str, Any] = {
    "uuid": "GPU-785fcafa-751f-783d-bebd-c6f475b668c4",
    "name": "NVIDIA H200",
    "compute_capability": [9, 0],
    "vram_total": 150754820096,
    "vram_free": 145262510080,
    "holders": [{"pid": 428, "name": "python3", "bytes": 4838129664}],
    "link": {"generation": 5, "width": 16, "max_generation": 5, "max_width": 16, "card_generation": 5},
    "clocks": {"memory_mhz": 3201, "memory_bits": 6016, "sm_mhz": 1980, "cores": 16896},
    "display": False,
    "temperature_c": 38,
    "utilisation": 0,
    "silent": {},
}
RTX_3070: dict[str, Any] = {
    "uuid": "GPU-11111111-2222-3333-4444-555555555555",
    "name": "NVIDIA GeForce RTX 3070",
    "compute_capability": [8, 6],
    "vram_total": 8 * GIB,
    "vram_free": 5 * GIB,
    "holders": [{"pid": 77, "name": "game", "bytes": 2 * GIB}, {"pid": 78, "name": None, "bytes": None}],
    "link": {"generation": 1, "width": 16, "max_generation": 4, "max_width": 16, "card_generation": 4},
    "clocks": {"memory_mhz": 7001, "memory_bits": 256, "sm_mhz": 1725, "cores": 5888},
    "display": True,
    "temperature_c": 45,
    "utilisation": 3,
    "silent": {},
}
LOST: dict[str, Any] = {"uuid": "GPU 1", "problem": "GPU is lost"}
UNANSWERED: dict[str, Any] = {"uuid": "GPU-0", "name": "NVIDIA GB10", "silent": {"memory": "Not Supported"}}


def document(*cards: dict[str, Any], driver: str = "580.159.04", cuda: tuple[int, int] = (13, 0)) -> dict[str, Any]:
    return {"driver": driver, "cuda": list(cuda), "cards": list(cards)}
