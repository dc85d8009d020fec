"""THE table of flags that users of the public FreeToken know and this one does not take, and what replaces them. Pure.

A flag that cannot be honoured is an error with a remedy, never ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.core.errors import UsageError

_ONE_DEVICE = "leave it out: this version runs on the CPU of one machine"
_PLANNED = "leave it out: the plan chooses, and ft status shows what it chose"

REPLACED = {
    "--api-key": "--api-key-file FILE or FREETOKEN_API_KEY: a key on the command line is seen by every process",
    "--model-path": "--model",
    "--page-size": "leave it out: pages have 16 tokens; --num-tokens or --num-pages sizes the pool",
    "--max-extend-length": "--max-prefill-length",
    "--context-length": "--max-seq-len-override",
    "--max-model-len": "--max-seq-len-override",
    "--mem-fraction-static": "--memory-ratio",
    "--gpu-memory-utilization": "--memory-ratio",
    "--cuda-graph-max-bs": _ONE_DEVICE,
    "--tensor-parallel-size": _ONE_DEVICE,
    "--tp-size": _ONE_DEVICE,
    "--tp": _ONE_DEVICE,
    "--disable-pynccl": _ONE_DEVICE,
    "--ram": "--memory-ratio",
    "--attn": _PLANNED,
    "--attention-backend": _PLANNED,
    "--cache-type": "leave it out: the prefix cache is always a radix tree",
    "--moe-cache-auto": "leave it out: the plan chooses the slots unless --moe-cache-size or --moe-cache-rate does",
    "--num-tokenizer": "leave it out: one tokenizer serves all requests",
    "--tokenizer-count": "leave it out: one tokenizer serves all requests",
    "--dummy-weight": "leave it out: weights are always those of the model",
    "--model-source": "leave it out: give --model a folder, a .gguf file or an id",
    "--served-model-name": "leave it out: the model's id is its name in every API",
    "--shell-mode": "ft chat",
    "--reproducible": "leave it out: give a request a seed",
}


def refuse_unknown(arguments: Sequence[str]) -> None:
    """Raise UsageError for the first of `arguments`, which no flag of ours took; nothing if there is none."""
    if not arguments:
        return
    flag = arguments[0].partition("=")[0]
    if flag in REPLACED:
        raise UsageError(f"{flag} is not taken here", fixes=(f"{REPLACED[flag]}",))
    raise UsageError(f"ft serve does not take {arguments[0]}", fixes=("ft serve --help lists what it takes",))
