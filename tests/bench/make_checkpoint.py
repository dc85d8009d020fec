"""Write a random Hugging Face checkpoint with the geometry of a real MoE model, for speed and memory measurements.

    make_checkpoint.py OUT --model qwen3-30b-a3b --layers 12 --format bf16|nvfp4 [--locality 0.6] [--seed 0]

The text it produces means nothing; shapes, tensor names, file layout and quantisation metadata are those of the public
checkpoints (bf16: plain; nvfp4: ModelOpt, experts e2m1 packed two to a byte, an e4m3 scale per 16 inputs, an fp32
global scale). Routing is set by --locality A: each token's embedding is sqrt(A) of one shared direction and sqrt(1 - A)
of its own, and the layers add almost nothing to it, so the experts chosen follow the token drawn. By simulation an LRU
cache that holds 12.5, 27 or 50 % of the experts then hits 0.49, 0.82 or 0.95 at A = 0.6, about what trained models
show, and 0.12, 0.24 or 0.48 at A = 0, the worst case. Measure with temperature 1.0: a greedy random model loops over
the same tokens. Tensors are drawn on the GPU where there is one, so the same seed gives other weights on a CPU: a
reference must read the files.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MODELS: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
    },
    "tiny": {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "intermediate_size": 512,
        "max_position_embeddings": 8192,
    },
}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NOT_QUANTISED = ["lm_head", "model.layers.*.self_attn*", "model.layers.*.mlp.gate"]


def nvfp4(weight: Tensor, amax_all: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise as ModelOpt does.

    weight: (out, in) bf16; amax_all: () fp32, the absolute maximum of the group that shares a global scale.
    Returns packed (out, in / 2) u8, low nibble first; scale (out, in / 16) e4m3; global scale () fp32.
    """
    wide = weight.float()
    rows, columns = wide.shape
    blocks = wide.view(rows, columns // 16, 16)
    overall = (amax_all / (6.0 * 448.0)).clamp(min=1e-12)
    scale = (blocks.abs().amax(-1) / 6.0 / overall).clamp(max=448.0).to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * overall).clamp(min=1e-20).unsqueeze(-1)
    midpoints = ((E2M1[1:] + E2M1[:-1]) / 2).to(wide.device)
    code = torch.bucketize(scaled.abs().clamp(max=6.0), midpoints).to(torch.uint8)
    code = (code | ((scaled < 0).to(torch.uint8) << 3)).view(rows, columns)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    return packed.contiguous(), scale.contiguous(), overall.reshape(())


class Writer:
    """Draws tensors and writes shards; keeps the index."""

    def __init__(self, out: Path, config: dict[str, Any], args: argparse.Namespace) -> None:
        self.out, self.config, self.args = out, config, args
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.index: dict[str, str] = {}
        self.total = 0

    def draw(self, *shape: int, std: float = 0.02) -> Tensor:
        return (torch.randn(*shape, device=self.device, dtype=torch.float32) * std).to(torch.bfloat16)

    def save(self, name: str, tensors: dict[str, Tensor]) -> None:
        held = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        save_file(held, self.out / name, metadata={"format": "pt"})
        self.index |= dict.fromkeys(held, name)
        self.total += sum(tensor.numel() * tensor.element_size() for tensor in held.values())

    def attention(self, prefix: str) -> dict[str, Tensor]:
        c = self.config
        hidden, head = c["hidden_size"], c["head_dim"]
        q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
        tensors = {
            f"{prefix}self_attn.q_proj.weight": self.draw(q, hidden),
            f"{prefix}self_attn.k_proj.weight": self.draw(kv, hidden),
            f"{prefix}self_attn.v_proj.weight": self.draw(kv, hidden),
            f"{prefix}self_attn.o_proj.weight": self.draw(hidden, q, std=0.0005),
        }
        norms = {"self_attn.q_norm": head, "self_attn.k_norm": head, "input_layernorm": hidden}
        norms["post_attention_layernorm"] = hidden
        return tensors | {f"{prefix}{n}.weight": torch.ones(size, dtype=torch.bfloat16) for n, size in norms.items()}

    def experts(self, prefix: str) -> dict[str, Tensor]:
        c = self.config
        hidden, width, count = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        banks = {
            name: self.draw(count, *shape, std=0.002 if name == "down_proj" else 0.02) for name, shape in shapes.items()
        }
        peaks = {name: bank.abs().amax((1, 2)).float() for name, bank in banks.items()}
        # ModelOpt gives both halves of a fused pair one global scale.
        peaks["gate_proj"] = peaks["up_proj"] = torch.maximum(peaks["gate_proj"], peaks["up_proj"])
        tensors: dict[str, Tensor] = {}
        for name, bank in banks.items():
            for expert in range(count):
                key = f"{prefix}mlp.experts.{expert}.{name}"
                if self.args.format == "bf16":
                    tensors[f"{key}.weight"] = bank[expert]
                    continue
                packed, scale, overall = nvfp4(bank[expert], peaks[name][expert])
                tensors |= {f"{key}.weight": packed, f"{key}.weight_scale": scale, f"{key}.weight_scale_2": overall}
                tensors[f"{key}.input_scale"] = torch.ones((), dtype=torch.float32)
        return tensors

    def weights(self) -> None:
        c = self.config
        layers, hidden, vocab = c["num_hidden_layers"], c["hidden_size"], c["vocab_size"]
        files = layers + 1
        for layer in range(layers):
            prefix = f"model.layers.{layer}."
            tensors = self.attention(prefix) | {f"{prefix}mlp.gate.weight": self.draw(c["num_experts"], hidden)}
            self.save(f"model-{layer + 1:05d}-of-{files:05d}.safetensors", tensors | self.experts(prefix))
        shared, own = self.args.locality**0.5, (1 - self.args.locality) ** 0.5
        embed = shared * self.draw(1, hidden, std=1.0).float() + own * self.draw(vocab, hidden, std=1.0).float()
        tail = {
            "model.embed_tokens.weight": embed.to(torch.bfloat16),
            "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
            "lm_head.weight": self.draw(vocab, hidden),
        }
        self.save(f"model-{files:05d}-of-{files:05d}.safetensors", tail)
        index = {"metadata": {"total_size": self.total}, "weight_map": self.index}
        (self.out / "model.safetensors.index.json").write_text(json.dumps(index))


def config_json(config: dict[str, int], quantised: bool) -> dict[str, Any]:
    """The model's config.json as the public checkpoints spell it."""
    document: dict[str, Any] = config | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_window_layers": config["num_hidden_layers"],
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if quantised:
        four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        group = {"input_activations": four_bits, "weights": four_bits, "targets": ["Linear"]}
        document["quantization_config"] = modelopt() | {"config_groups": {"group_0": group}, "ignore": NOT_QUANTISED}
    return document


def modelopt() -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": NOT_QUANTISED,
    }


def write_tokenizer(out: Path, vocab: int, max_length: int) -> None:
    """Words t3, t4, …: the text `t17 t4242` is the ids 17 4242, so a prompt can reach every row of the embedding."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<bos>": 0, "<eos>": 1, "<unk>": 2} | {f"t{i}": i for i in range(3, vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<unk>"])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": max_length,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=MODELS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--format", default="bf16", choices=["bf16", "nvfp4"])
    parser.add_argument("--locality", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty: what lies there would be read as part of this checkpoint")
    torch.manual_seed(args.seed)
    started = time.time()
    config = MODELS[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    writer = Writer(args.out, config, args)
    writer.weights()
    quantised = args.format == "nvfp4"
    if quantised:
        quantization = {key: value for key, value in modelopt().items() if key != "quant_method"}
        document = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}
        (args.out / "hf_quant_config.json").write_text(json.dumps(document))
    (args.out / "config.json").write_text(json.dumps(config_json(config, quantised), indent=1))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "temperature": 1.0}
    (args.out / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(args.out, config["vocab_size"], config["max_position_embeddings"])
    print(f"{args.out}: {writer.total / 1e9:.2f} GB in {time.time() - started:.1f} s")


if __name__ == "__main__":
    main()
