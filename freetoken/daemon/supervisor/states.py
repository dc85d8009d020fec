"""The engine's life as a table of legal moves. Pure."""

from __future__ import annotations

from freetoken.daemon.state import EngineStatus as S

MOVES: dict[S, frozenset[S]] = {
    S.STOPPED: frozenset({S.STARTING}),
    S.STARTING: frozenset({S.LOADING, S.STOPPING, S.STOPPED, S.FAILED}),  # STOPPED: cancelled before a process began
    S.LOADING: frozenset({S.WARMING, S.READY, S.STOPPING, S.FAILED}),
    S.WARMING: frozenset({S.READY, S.STOPPING, S.FAILED}),
    S.READY: frozenset({S.DRAINING, S.STOPPING, S.FAILED}),
    S.DRAINING: frozenset({S.STOPPING, S.FAILED}),
    S.STOPPING: frozenset({S.STOPPED, S.FAILED}),
    S.FAILED: frozenset({S.STARTING, S.STOPPED}),
}
WARMING_PHASES = frozenset({"compile_kernels", "capture_graphs", "warmup"})  # of a load: the weights are in place


def check_move(old: S, new: S) -> None:
    """The supervisor's own promise: it never skips a state that watchers wait for."""
    if new not in MOVES[old]:
        raise RuntimeError(f"the engine cannot go from {old} to {new}")
