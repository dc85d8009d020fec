"""ModelSpecs of real models, written from their public configurations, and small ones of every arrangement. Pure."""

from __future__ import annotations

from freetoken.catalog.spec import (
    Attention,
    Branch,
    Dense,
    EmbeddingSpec,
    HeadSpec,
    IndexSpec,
    Latent,
    LayerSpec,
    Mixer,
    ModelSpec,
    NormSpec,
    Pooled,
    Recurrent,
    RopeSpec,
    Routed,
    Router,
)

NORM = NormSpec()
ROPES = {"main": RopeSpec(1e6, 64)}


def layer(mixer: Mixer, *ffn: Branch) -> LayerSpec:
    return LayerSpec(mixer, ffn or (dense(1024),), NORM, NORM)


def dense(width: int, name: str = "dense") -> Branch:
    return Branch(name, Dense(width))  # type: ignore[arg-type]


def routed(experts: int, top_k: int, width: int) -> Branch:
    return Branch("experts", Routed(Router(experts, top_k), width))


def spec(hidden: int, layers: tuple[LayerSpec, ...], vocab: int = 32_000, window: int = 8192) -> ModelSpec:
    return ModelSpec(hidden, layers, EmbeddingSpec(vocab), HeadSpec(norm=NORM), ropes=ROPES, max_positions=window)


def attention(heads: int, kv_heads: int, dim: int, window: int | None = None, *, gate: bool = False) -> Attention:
    return Attention(heads, kv_heads, dim, "main", dim**-0.5, window, qk_norm=NORM, out_gate=gate)


DELTA = Recurrent(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv=4, norm=NORM)


def qwen3_6_35b_a3b() -> ModelSpec:
    """Qwen3.6-35B-A3B: every fourth layer full attention with an output gate, the others gated delta rule."""
    shared = Branch("shared", Dense(512), gated=True)
    ffn = (routed(256, 8, 512), shared)
    full = layer(attention(16, 2, 256, gate=True), *ffn)
    return spec(2048, (*(layer(DELTA, *ffn),) * 3, full) * 10, vocab=248_320, window=262_144)


def qwen3_30b_a3b() -> ModelSpec:
    """Qwen3-30B-A3B."""
    return spec(2048, (layer(attention(32, 4, 128), routed(128, 8, 768)),) * 48, vocab=151_936, window=262_144)


def mixers(name: str) -> tuple[Mixer, ...]:
    """The mixers of a released model, one for each layer."""
    token_index = IndexSpec("tokens", heads=32, dim=128, keep=2048, rope="main")
    block_index = IndexSpec("block_max", heads=4, dim=128, keep=16, rope="main", block=128)
    pooled_index = IndexSpec("pooled", heads=64, dim=128, keep=512, rope="main")
    latent = {"heads": 128, "q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}
    pool = {"heads": 64, "head_dim": 512, "q_rank": 1024, "o_groups": 8, "o_rank": 1024, "window": 128}
    plain, indexed = attention(64, 4, 128), Attention(64, 4, 128, "main", 1.0, index=block_index)

    def latents(index: IndexSpec | None) -> Latent:
        return Latent(**latent, rope="main", scale=1.0, index=index)

    def pooled(ratio: int, index: IndexSpec | None = None) -> Pooled:
        return Pooled(**pool, rope="main", scale=1.0, norm=NORM, ratio=ratio, index=index)

    known: dict[str, tuple[Mixer, ...]] = {
        "deepseek_v3": (latents(None),) * 61,
        "glm_moe_dsa": (latents(token_index),) * 78,
        "minimax_m2": (attention(48, 8, 128),) * 62,
        "minimax_m3": (plain,) * 3 + (indexed,) * 57,
        "gpt_oss": (attention(64, 8, 64, 128), attention(64, 8, 64)) * 18,
        "qwen3_next": (DELTA, DELTA, DELTA, attention(16, 2, 256)) * 12,
        "qwen3_5_moe": (DELTA, DELTA, DELTA, attention(16, 2, 256)) * 10,
        "deepseek_v4": (pooled(0),) * 2 + (pooled(4, pooled_index),) * 21 + (pooled(128),) * 20,
    }
    return known[name]
