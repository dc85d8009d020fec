"""What was planned beside what a load was seen to take, and what of it the next plan should use. Pure.

Right after a load the caches hold nothing yet, so the process is smaller than its plan by the pages that nobody has
written and the scratch that no step has needed; lines are compared one by one. Does not know how things are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SEEN = {"weights": "weights_bytes", "kv_pages": "kv_bytes"}


def compared(plan: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """The data of plan.compared: lines that were measured, and the whole. `plan` is the plan JSON."""
    planned = {line["line"]: int(line["bytes"]) for line in plan["ledger"]}
    lines = [
        {"line": line, "predicted_bytes": planned[line], "measured_bytes": int(measured[name])}
        for line, name in _SEEN.items()
        if line in planned and name in measured
    ]
    held = measured.get("process_bytes")
    return {
        "lines": lines,
        "total_predicted_bytes": int(plan["total_bytes"]),
        "total_measured_bytes": None if held is None else int(held),
    }


def residual(plan: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, int]:
    """Ledger lines as this load showed them, for the next plan of this model on this device.

    On a CPU: what the process holds beside its weights before any request, which the plan had to assume. Empty where
    it was not measured, or where it makes no sense (pages that the system has taken back).
    """
    device = plan["resolved"]["device"]["value"]
    held, weights = measured.get("process_bytes"), measured.get("weights_bytes")
    if device != "cpu" or held is None or weights is None or held <= weights:
        return {}
    return {"allocator": int(held) - int(weights)}
