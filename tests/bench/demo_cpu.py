"""The demo model on this machine's CPU beside its peers, in one run: decode and prefill, medians and ratios.

    demo_cpu.py --model FOLDER --gguf FILE.gguf [--llama-python PYTHON] [--peers A,B] [--rounds 3] [--json]

Peers, each a process of its own that is idle while another is measured; all take the same token ids:
    inproc         our engine, in process (engine.inproc), the demo folder: 8 experts a layer, all routed
    stream         the same through the daemon: HTTP, server-sent events
    transformers   the dense model of the GGUF file in fp32
    llama.cpp      the GGUF file as it is (Q4_1), through llama-cpp-python where --llama-python has it; 2 threads
Decode: 64 tokens after 16. Prefill: time to the first token of 1 100 random tokens. Rounds take the peers in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROMPT, OUTPUT, PREFILL = 16, 64, 1100
Generate = Callable[[list[int], int], Iterator[float]]  # (token ids, tokens wanted) -> the moment of each token


def token_ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(count)]


def measure(generate: Generate, seed: int) -> dict[str, float]:
    moments = list(generate(token_ids(seed, PROMPT), OUTPUT))
    decode = (len(moments) - 1) / (moments[-1] - moments[0])
    started = time.perf_counter()
    first = next(iter(generate(token_ids(seed + 1, PREFILL), 1)))
    return {"decode_tok_s": decode, "prefill_tok_s": PREFILL / (first - started)}


# ── peers: each loads, then yields a generate function ──────────────────────────────────────────────────────────────
def transformers_peer(args: argparse.Namespace) -> Iterator[Generate]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    path = Path(args.gguf)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def generate(ids: list[int], count: int) -> Iterator[float]:
        cache, step = None, torch.tensor([ids])
        with torch.inference_mode():
            for _ in range(count):
                out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
                yield time.perf_counter()

    yield generate


def llama_peer(args: argparse.Namespace) -> Iterator[Generate]:
    from llama_cpp import Llama

    model = Llama(str(args.gguf), n_ctx=2048, n_threads=args.threads, n_threads_batch=args.threads, verbose=False)

    def generate(ids: list[int], count: int) -> Iterator[float]:
        model.reset()
        model.eval(ids)
        for _ in range(count):
            token = model.sample(temp=0.0)
            yield time.perf_counter()
            model.eval([token])

    yield generate


async def _inproc_backend(runner: Any, resolved: Any) -> Any:
    """Made inside the event loop that will use it."""
    from freetoken.engine.inproc import InprocBackend

    return InprocBackend(runner, resolved)


def inproc_peer(args: argparse.Namespace) -> Iterator[Generate]:
    import asyncio

    from freetoken.engine.threads import wait_politely

    wait_politely()
    from freetoken.catalog.checkpoint import open_checkpoint
    from freetoken.core.events import Failed, Tokens
    from freetoken.core.types import GenerateRequest, SamplingParams
    from freetoken.engine.assemble import assemble
    from freetoken.plan.choices import Requested
    from freetoken.plan.hardware import snapshot
    from freetoken.plan.placement import make_plan

    plan = make_plan(open_checkpoint(Path(args.model)), Requested(threads=args.threads), snapshot())
    assert plan.resolved is not None, plan.diagnosis
    engine = assemble(Path(args.model), plan.resolved, lambda *_: None, lambda: False)
    loop = asyncio.new_event_loop()
    backend = loop.run_until_complete(_inproc_backend(engine.runner, plan.resolved))

    def generate(ids: list[int], count: int) -> Iterator[float]:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        stream = backend.generate(GenerateRequest(f"bench-{time.time_ns()}", tuple(ids), sampling))
        while True:
            try:
                event = loop.run_until_complete(anext(stream))
            except StopAsyncIteration:
                return
            if isinstance(event, Failed):
                raise RuntimeError(event.detail)
            if isinstance(event, Tokens):
                yield from [time.perf_counter()] * len(event.token_ids)

    yield generate
    loop.run_until_complete(backend.close())


def stream_peer(args: argparse.Namespace) -> Iterator[Generate]:
    import httpx

    from freetoken.client.control import ControlClient
    from freetoken.client.discovery import find

    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"FREETOKEN_HOME": home}
        command = [sys.executable, "-m", "freetoken.daemon.main", "--port", "0", "--owned"]
        daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert daemon.stdout is not None
        url = json.loads(daemon.stdout.readline())["url"]
        with ControlClient(find(Path(home))) as control:
            operation = control.load(str(Path(args.model).resolve()), {"threads": args.threads})
            assert operation is not None
            for _ in control.follow(operation.id):
                pass
            model = control.engine()["model"]
        http = httpx.Client(base_url=url, timeout=600, trust_env=False)

        def generate(ids: list[int], count: int) -> Iterator[float]:
            body = {"model": model, "prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
            with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                        yield time.perf_counter()

        yield generate
        daemon.terminate()
        daemon.wait(30)


PEERS = {"inproc": inproc_peer, "stream": stream_peer, "transformers": transformers_peer, "llama.cpp": llama_peer}


def serve(args: argparse.Namespace) -> None:
    """The child: load, say so, then one measurement a line of input."""
    say = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        peer = PEERS[args.peer](args)
        generate = next(peer)
        measure(generate, 1)  # warm-up
        print("{}", file=say, flush=True)
        for line in sys.stdin:
            print(json.dumps(measure(generate, int(line))), file=say, flush=True)
        next(peer, None)


def start(name: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    python = args.llama_python if name == "llama.cpp" else sys.executable
    options = [f"--model={args.model}", f"--gguf={args.gguf}", f"--threads={args.threads}"]
    log = Path(args.logs) / f"{name}.log"
    command = [python, __file__, "--peer", name, *options]
    with log.open("w") as errors:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert child.stdout is not None
    if not child.stdout.readline():
        raise SystemExit(f"{name} did not start: {log.read_text()[-1500:]}")
    return child


Rows = dict[str, list[dict[str, float]]]  # by peer, one row a round


def compare(args: argparse.Namespace) -> Rows:
    """Every peer's figures, round by round."""
    names = [name for name in args.peers.split(",") if name != "llama.cpp" or args.llama_python]
    children = {name: start(name, args) for name in names}
    rows: Rows = {name: [] for name in names}
    for number in range(args.rounds):
        for name, child in children.items():
            assert child.stdin is not None and child.stdout is not None
            print(1000 + 10 * number, file=child.stdin, flush=True)
            rows[name].append(json.loads(child.stdout.readline()))
            print(f"round {number + 1} {name}: {rows[name][-1]}", file=sys.stderr)
    for child in children.values():
        child.communicate(timeout=60)
    return rows


def medians(rows: Rows) -> dict[str, dict[str, float]]:
    """Each peer's median, and `x_*`: how many times its speed the first peer reaches, the median over the rounds'
    own ratios, because the machine's speed drifts between rounds."""
    first = next(iter(rows.values()))
    return {
        name: {key: statistics.median(row[key] for row in mine) for key in mine[0]}
        | {f"x_{key}": statistics.median(a[key] / b[key] for a, b in zip(first, mine, strict=True)) for key in mine[0]}
        for name, mine in rows.items()
    }


def report(figures: dict[str, dict[str, float]]) -> None:
    first = next(iter(figures))
    print(f"{'peer':<14}{'decode tok/s':>14}{f'{first} is':>12}{'prefill tok/s':>15}{f'{first} is':>12}")
    for name, row in figures.items():
        decode = f"{row['decode_tok_s']:>14.1f}{row['x_decode_tok_s']:>11.2f}x"
        print(f"{name:<14}{decode}{row['prefill_tok_s']:>15.1f}{row['x_prefill_tok_s']:>11.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the demo folder")
    parser.add_argument("--gguf", required=True, help="the GGUF file that the demo was made of")
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--peers", default=",".join(PEERS), help="which, in this order")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--logs", default=tempfile.gettempdir())
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        serve(args)
        return
    figures = medians(compare(args))
    if args.json:
        print(json.dumps(figures))
    else:
        report(figures)


if __name__ == "__main__":
    main()
