"""How long a plan takes, from headers alone: 500 shards of a large routed model, their data not there.

    plan_speed.py [--shards 500] [--layers 60] [--experts 512] [--rounds 5]

Writes sparse safetensors files with true headers (about 92 000 tensors, 600 GB that take no room), then prints the best
of several rounds for: opening them by `outline`; sizes and a plan for a CPU and for a card of 24 GiB, with the
checkpoint open; and the whole command `ft plan`, with all headers there and with the index alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "eos_token_id": 151645,
}
Shapes = dict[str, list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=500)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count = write(Path(folder), args.shards, args.layers, args.experts)
        print(f"{count:,} tensors in {args.shards} shards")
        measure(Path(folder), args.rounds)
        report("ft plan, headers", args.rounds, lambda: command(folder))
        for shard in Path(folder).glob("*.safetensors"):
            shard.unlink()
        report("ft plan, index", args.rounds, lambda: command(folder))


def measure(folder: Path, rounds: int) -> None:
    from freetoken.catalog.outline import outline
    from freetoken.core.units import Bytes
    from freetoken.plan import memory
    from freetoken.plan.choices import Requested
    from freetoken.plan.hardware import described, snapshot
    from freetoken.plan.placement import make_plan

    here = snapshot()
    cpu, card = described(None, Bytes(2 << 40), here), described(Bytes(24 << 30), Bytes(2 << 40), here)
    checkpoint = report("outline", rounds, lambda: outline(folder))
    report("footprints, cpu", rounds, lambda: memory.footprints(checkpoint, "cpu"))
    report("footprints, cuda", rounds, lambda: memory.footprints(checkpoint, "cuda"))
    report("plan, cpu", rounds, lambda: make_plan(checkpoint, Requested(), cpu))
    report("plan, cuda", rounds, lambda: make_plan(checkpoint, Requested(), card))


def command(folder: str) -> None:
    """The whole command, the interpreter's start included."""
    flags = ["--vram", "24GiB", "--ram", "2TiB", "--json"]
    program = [sys.executable, "-c", "from freetoken.cli.main import run; run()", "plan", folder, *flags]
    subprocess.run(program, stdout=subprocess.DEVNULL, check=True, timeout=60)


def report(name: str, rounds: int, run: Callable[[], Any]) -> Any:
    """Print the first round and the best; the result of the last."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - started)
    print(f"{name:<18} first {1000 * seconds[0]:8.2f} ms, best {1000 * min(seconds):8.2f} ms")
    return result


def write(folder: Path, shards: int, layers: int, experts: int) -> int:
    """A checkpoint without data in `folder`; returns how many tensors it has."""
    config = CONFIG | {"num_hidden_layers": layers, "num_experts": experts}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = list(shapes(config).items())
    step = -(-len(tensors) // shards)
    index = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        some = dict(tensors[number * step : (number + 1) * step])
        write_shard(folder / name, some)
        index |= dict.fromkeys(some, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return len(index)


def shapes(config: dict[str, Any]) -> Shapes:
    """The tensors of a Qwen3-MoE checkpoint under their public names."""
    hidden, head, width = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer: Shapes = {
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.q_proj": [queries, hidden],
        "self_attn.k_proj": [keys, hidden],
        "self_attn.v_proj": [keys, hidden],
        "self_attn.o_proj": [hidden, queries],
        "self_attn.q_norm": [head],
        "self_attn.k_norm": [head],
        "mlp.gate": [config["num_experts"], hidden],
    }
    for expert in range(config["num_experts"]):
        for part, shape in (("gate", [width, hidden]), ("up", [width, hidden]), ("down", [hidden, width])):
            layer[f"mlp.experts.{expert}.{part}_proj"] = shape
    frame: Shapes = {
        "model.embed_tokens": [config["vocab_size"], hidden],
        "model.norm": [hidden],
        "lm_head": [config["vocab_size"], hidden],
    }
    inner = {
        f"model.layers.{n}.{name}": shape for n in range(config["num_hidden_layers"]) for name, shape in layer.items()
    }
    return {f"{name}.weight": shape for name, shape in (frame | inner).items()}


def write_shard(path: Path, tensors: Shapes) -> None:
    """A file of the right size whose data is a hole."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


if __name__ == "__main__":
    main()
