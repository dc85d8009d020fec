"""Stored format -> decoder, and weight dtype -> torch dtype. A new format is one line here and one file beside it."""

from __future__ import annotations

import torch
from freetoken_kernels.reference import ggml

from freetoken.core.registry import Registry
from freetoken.engine.quant.base import Decoder
from freetoken.engine.quant.ggml import blocks
from freetoken.engine.quant.plain import plain

DECODERS: Registry[Decoder] = Registry(
    "stored format",
    {
        "F32": plain(torch.float32),
        "F16": plain(torch.float16),
        "BF16": plain(torch.bfloat16),
        "Q8_0": blocks(ggml.q8_0),
        "Q4_0": blocks(ggml.q4_0),
        "Q4_1": blocks(ggml.q4_1),
    },
)

WEIGHT_DTYPES: Registry[torch.dtype] = Registry("weight dtype", {"float32": torch.float32, "bfloat16": torch.bfloat16})
