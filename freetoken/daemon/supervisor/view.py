"""GET /engine: all that is known of the engine, as one JSON-ready value. Reads; changes nothing.

Unknown is null. Does not know HTTP.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from freetoken.daemon.supervisor.actor import Supervisor
from freetoken.daemon.supervisor.launch import Running
from freetoken.wire.messages import Stats

_EXPERT_FIELDS = frozenset({"layers_routed", "experts", "expert_tokens", "hits"})
_MEMORY_FIELDS = frozenset({"rss_bytes"})


def engine_view(supervisor: Supervisor) -> dict[str, Any]:
    """state.EngineState's fields, the restart that is due, the diagnoses that stand, then the running engine's."""
    return {
        **msgspec.to_builtins(supervisor.state),
        "restart": supervisor.crashes.view(),
        "diagnoses": supervisor.tell.diagnoses,
        **_running_view(supervisor.running),
    }


def _running_view(running: Running | None) -> dict[str, Any]:
    stats = running.remote.stats if running else None
    beat = running.remote.beat if running else None
    return {
        "context_tokens": running.model.context_tokens if running else None,
        "uptime_ms": round(1000 * (time.time() - running.since)) if running else None,
        "plan": running.ready.plan if running else None,
        "measured": running.ready.measured if running else None,
        "stats": _counters(stats) if stats else None,
        "experts": _experts(stats) if stats and stats.experts else None,
        "memory": _memory(running, stats) if running else None,
        "step_age_ms": beat.step_age_ms if beat else None,
    }


def _counters(stats: Stats) -> dict[str, Any]:
    fields = msgspec.structs.asdict(stats)
    return {name: value for name, value in fields.items() if name not in _EXPERT_FIELDS | _MEMORY_FIELDS}


def _experts(stats: Stats) -> dict[str, Any]:
    """`tokens` counts, since ready, the tokens that the router sent to each expert of each routed layer."""
    return {
        "layers": stats.layers_routed,
        "experts": stats.experts,
        "tokens": stats.expert_tokens,
        "hits": stats.hits,
    }


def _memory(running: Running, stats: Stats | None) -> dict[str, Any]:
    return {
        "rss_bytes": stats.rss_bytes if stats else None,
        "budget_bytes": running.ready.plan.get("budget_bytes"),
        "total_bytes": running.ready.plan.get("total_bytes"),
        "ledger": running.ready.plan.get("ledger"),
    }
