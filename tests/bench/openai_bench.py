"""Measure any OpenAI-compatible server: time to first token and decode rate over streaming completions.

    openai_bench.py BASE_URL MODEL --prompt-tokens 1200 --output-tokens 128 --requests 4 --parallel 1

Prints one JSON line: medians of ttft_s and decode_tok_s (per stream), decode_sum_tok_s (that times the streams),
prefill_tok_s (uncached prompt tokens over time to first token), total_tok_s (all output tokens over the whole time,
prefill included). Exit 1 if any request failed. Uses the standard library alone, so that it runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One request as it came out."""

    ttft_s: float
    output_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    decode_tok_s: float | None


def prompt(args: argparse.Namespace, seed: int) -> str:
    rng = random.Random(seed)
    if args.vocab:  # make_checkpoint.py's words: one token each, over the whole vocabulary
        return " ".join(f"t{rng.randrange(3, args.vocab)}" for _ in range(args.prompt_tokens))
    letters = " ".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(args.prompt_tokens))
    return letters[: args.prompt_tokens]


def events(args: argparse.Namespace, text: str) -> Iterator[dict[str, Any]]:
    """The JSON documents of one streamed answer."""
    chat = args.endpoint == "chat"
    body = {
        "model": args.model,
        "stream": True,
        "max_tokens": args.output_tokens,
        "temperature": args.temperature,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    } | ({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text})
    url = f"{args.base}/v1/{'chat/completions' if chat else 'completions'}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        response = opener.open(request, timeout=600)
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code}: {error.read(400).decode(errors='replace')}") from None
    with response:
        for line in response:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                yield json.loads(data)


def measure(args: argparse.Namespace, seed: int) -> Sample:
    """Run one request. Raises RuntimeError where the stream is not whole."""
    text = prompt(args, seed)
    started = time.perf_counter()
    first = last = 0.0
    chunks = 0
    usage: dict[str, Any] = {}
    finish = None
    for event in events(args, text):
        if event.get("error"):
            raise RuntimeError(f"error in mid-stream: {json.dumps(event['error'])[:300]}")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            finish = choice.get("finish_reason") or finish
            if delta.get("content") or delta.get("reasoning_content") or choice.get("text"):
                last = time.perf_counter()
                first = first or last
                chunks += 1
    if not first or finish is None:
        raise RuntimeError(f"stream ended without {'a finish_reason' if first else 'a token'} after {chunks} chunks")
    output = usage.get("completion_tokens", chunks)
    return Sample(
        ttft_s=first - started,
        output_tokens=output,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        # The first chunk's tokens were there at `first`.
        decode_tok_s=output * (1 - 1 / chunks) / (last - first) if last > first else None,
    )


def run(args: argparse.Namespace, seed: int) -> tuple[list[Sample], list[str], float]:
    """All requests over `parallel` threads: samples, errors, wall seconds."""
    samples: list[Sample] = []
    errors: list[str] = []
    todo = list(range(args.requests))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                number = todo.pop(0)
            try:
                sample = measure(args, seed + number)
            except (RuntimeError, OSError) as error:
                with lock:
                    errors.append(repr(error))
            else:
                with lock:
                    samples.append(sample)

    threads = [threading.Thread(target=work) for _ in range(args.parallel)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return samples, errors, time.perf_counter() - started


def summary(args: argparse.Namespace, samples: list[Sample], errors: list[str], wall_s: float) -> dict[str, Any]:
    head = {"label": args.label, "n": len(samples) + len(errors), "errors": errors[:3], "wall_s": round(wall_s, 2)}
    if not samples:
        return head
    rates = [s.decode_tok_s for s in samples if s.decode_tok_s]
    prefill = [(s.prompt_tokens - (s.cached_tokens or 0)) / s.ttft_s for s in samples if s.prompt_tokens]
    median = statistics.median(rates) if rates else None
    return head | {
        "prompt_tokens": samples[0].prompt_tokens,
        "cached_tokens": max((s.cached_tokens or 0) for s in samples),
        "ttft_s": round(statistics.median(s.ttft_s for s in samples), 4),
        "prefill_tok_s": round(statistics.median(prefill), 1) if prefill else None,
        "decode_tok_s": round(median, 2) if median else None,
        "decode_sum_tok_s": round(args.parallel * median, 2) if median else None,
        "total_tok_s": round(sum(s.output_tokens for s in samples) / wall_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, default=1200)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--endpoint", default="chat", choices=["chat", "completions"])
    parser.add_argument("--label", default="")
    parser.add_argument("--temperature", type=float, default=1.0, help="1.0 keeps a random model from looping")
    parser.add_argument("--vocab", type=int, help="prompts of make_checkpoint.py's words t3..t{VOCAB-1}")
    parser.add_argument("--seed", type=int, help="default: new each run, so that no run finds the last one's prompts")
    parser.add_argument("--each", action="store_true", help="print every request's figures too")
    args = parser.parse_args()
    seed = int.from_bytes(os.urandom(4)) if args.seed is None else args.seed
    samples, errors, wall_s = run(args, seed)
    if args.each:
        for sample in samples:
            print(json.dumps(asdict(sample)))
    print(json.dumps(summary(args, samples, errors, wall_s)), flush=True)
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
