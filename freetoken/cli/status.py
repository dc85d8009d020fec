"""`ft status`: the engine, its model, rates, memory and experts on one screen.

Reads GET /engine; a fact that is not known is left out. Does not know how any of it came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from freetoken.cli import output
from freetoken.cli.session import connect
from freetoken.core.units import Bytes, Seconds

Facts = Mapping[str, Any]
Row = tuple[str, str]


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("status", help="What is loaded, how fast it is and where the memory is.")(status)


def status(as_json: Annotated[bool, typer.Option("--json", help="Print GET /engine as it is.")] = False) -> None:
    with connect() as client:
        engine = client.engine()
    output.show(engine, [("daemon", client.address.url), *rows(engine)], as_json=as_json)


def rows(engine: Facts) -> Iterator[Row]:
    """What GET /engine says, as rows for people."""
    yield from _engine(engine)
    yield from _failure(engine.get("failure"))
    plan, stats = engine.get("plan"), engine.get("stats")
    if plan:
        context = plan.get("context", {})
        yield "context", f"{context.get('effective_tokens'):,} of the model's {context.get('window_tokens'):,} tokens"
    if stats:
        yield from _stats(stats)
    if engine.get("experts"):
        yield "experts", experts(engine["experts"])
    if engine.get("memory"):
        yield from _memory(engine["memory"], engine.get("measured") or {})


def experts(facts: Facts) -> str:
    """`30 × 8 experts` and how evenly the router uses them: the least and the most used expert of any layer.

    `tokens` holds, by routed layer and expert, how many tokens the router sent there.
    """
    size = f"{facts['layers']} × {facts['experts']} experts"
    counts: Sequence[Sequence[int]] = [layer for layer in facts["tokens"] if sum(layer)]
    if not counts:
        return f"{size}, no token routed yet"
    shares = [count / sum(layer) for layer in counts for count in layer]
    routed = sum(map(sum, counts))
    return (
        f"{size}, {routed:,} choices of the router; "
        f"an expert takes {min(shares):.1%} to {max(shares):.1%} of its layer's"
    )


def _engine(engine: Facts) -> Iterator[Row]:
    up = engine.get("uptime_ms")
    since = "" if up is None else f", up {Seconds(up / 1000)}"
    process = f" (pid {engine['pid']})" if engine.get("pid") else ""
    yield "engine", f"{engine['state']}{since}{process}"
    if engine.get("model"):
        options = " ".join(f"{name}={value}" for name, value in (engine.get("options") or {}).items())
        yield "model", f"{engine['model']}{f' ({options})' if options else ''}"


def _failure(failure: Facts | None) -> Iterator[Row]:
    if failure:
        yield "failed", output.printable(failure.get("detail", ""))
        for fix in failure.get("fixes", ()):
            yield "  fix", output.printable(fix.get("title", ""))


def _stats(stats: Facts) -> Iterator[Row]:
    yield "requests", f"{stats['running']} running, {stats['queued']} waiting"
    yield "now", f"{stats['decode_tok_s']:.1f} tok/s decode, {stats['prefill_tok_s']:.0f} tok/s prefill"
    prompt = f"{stats['prompt_tokens']:,} prompt ({stats['cached_tokens']:,} from the prefix cache)"
    yield "tokens", f"{prompt}, {stats['output_tokens']:,} output"
    free, cached = stats["pages_free"], stats["pages_cached"]
    yield "KV pages", f"{stats['pages_total']:,}: {free:,} free, {cached:,} hold prefixes"


def _memory(memory: Facts, measured: Facts) -> Iterator[Row]:
    """Where the memory went: what was measured where it was, what was planned elsewhere."""
    if memory.get("rss_bytes") is not None:
        budget = memory.get("budget_bytes")
        of_budget = f", of {Bytes(budget)} that may be used" if budget is not None else ""
        yield "memory", f"{Bytes(memory['rss_bytes'])} resident now; reserved{of_budget}:"
    real = {"weights": measured.get("weights_bytes"), "kv_pages": measured.get("kv_bytes")}
    for line in memory.get("ledger") or ():
        name, size = line["line"], real.get(line["line"])
        basis = line["basis"] if size is None else "measured"
        detail = f", {line['detail']}" if line.get("detail") else ""
        yield f"  {name.replace('_', ' ')}", f"{Bytes(line['bytes'] if size is None else size)} ({basis}{detail})"
