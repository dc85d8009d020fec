"""What a model computes, as 22 frozen dataclasses. Pure; no torch, no file names, no quantisation.

One decoder block reads all of them:

    x = embed[ids] * embed.scale                       (repeated `count` times where the residual is streams)
    for each layer:
        x += ngram(x, ids)                             where inject is NGram
        h, c = residual.read(x);  x = residual.write(x, c, post_mixer(mixer(pre_mixer(h))))
        r, c = residual.read(x);  h = pre_ffn(r)
        x = residual.write(x, c, post_ffn(sum(branch(r, h, ids) for branch in ffn)))
        x += norm(proj(gelu_tanh(gate x) * t[i]))      where inject is TokenTable
        x *= out_scale                                 where the layer has one
    logits = softcap * tanh((head(norm(residual.close(x))) / divisor) / softcap)

A norm that is None is the identity. Facts were read from transformers 5.24 (model, configuration and conversion code)
and the model cards; each family's reader under families/ says which fields its configuration sets.
Does not know: names in files (names.py), how tensors are stored (encodings.py), where they live (plan/, engine/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


# ── small parts ─────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class NormSpec:
    """y = x * rsqrt(mean(x^2) + eps) * weight in fp32, cast once at the end. The size is given by the place.

    Families whose files store weight - 1 are folded at load (names.AddOne), so there is no flag for it.
    """

    eps: float = 1e-6
    weight: bool = True  # False: no tensor
    kind: Literal["rms", "layer"] = "rms"  # layer: LayerNorm with weight and bias
    group: int | None = None  # statistics per group of that many channels; the weight keeps its full length


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the inverse frequencies f are stretched. Formulas: engine/layers/rope.py, after the papers it names."""

    kind: Literal["linear", "llama3", "yarn", "longrope", "proportional"]
    factor: float = 1.0
    original: int = 0  # context length of pre-training, tokens
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first (or last) `dim` channels; cos and sin in fp32. inv_freq_i = theta^(-2i/dim)."""

    theta: float
    dim: int
    pairs: int | None = None  # frequencies from this index on are 0; the exponent is still divided by dim
    interleaved: bool = False  # False: pairs (i, i + dim/2); True: pairs (2i, 2i + 1)
    tail: bool = False  # rotate the last `dim` channels instead of the first
    scaling: RopeScaling | None = None
    attn_factor: float = 1.0  # multiplies cos and sin, so its square reaches the attention logits


@dataclass(frozen=True, slots=True)
class GluSpec:
    """g <- min(g, limit), u <- clamp(u, +-limit); sigmoid: (u + up_shift) * g * sigmoid(alpha * g), which is SwiGLU
    by default; gelu_tanh: gelu_tanh(g) * u."""

    kind: Literal["sigmoid", "gelu_tanh"] = "sigmoid"
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0


# ── mixers ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Which cached positions a query may read, chosen by a small scorer ("lightning indexer" and its kin)."""

    pick: Literal["tokens", "block_max", "block_mean", "pooled"]
    heads: int
    dim: int
    keep: int  # tokens, blocks or entries kept
    rope: str
    norm: NormSpec | None = None
    block: int = 1
    local: int = 0  # newest blocks that are always kept
    reuse: int | None = None  # takes this earlier layer's selection: no weights, no cache


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention over cached keys and values: full, sliding-window and block-sparse are its fields."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: str | None  # name in ModelSpec.ropes
    scale: float  # multiplies q.k once; usually head_dim ** -0.5
    window: int | None = None  # query p sees p - window < j <= p (the window includes p itself)
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None  # always before rope
    qk_norm_scope: Literal["head", "all"] = "head"  # all: over the whole projection, before clip and head split
    v_norm: NormSpec | None = None
    clip: float | None = None  # clamp q, k, v after the norm, before rope
    sinks: bool = False  # one learned logit per head joins the softmax and is dropped after it; not scaled
    out_gate: bool = False  # o <- o * sigmoid(gate(x)), before the output projection
    v_is_k: bool = False  # v = k before k-norm and rope
    kv_from: int | None = None  # no keys and values of its own: reads this earlier layer's
    index: IndexSpec | None = None


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): caches one low-rank row and one rotated key."""

    heads: int
    q_rank: int | None  # None: queries straight from x
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: str
    scale: float
    norm: NormSpec = NormSpec(1e-6)  # these norms keep eps 1e-6 whatever rms_norm_eps says
    bias: bool = False
    index: IndexSpec | None = None


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Gated delta rule (arXiv 2412.06464) behind a short causal convolution; state S is fp32."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int  # width of the depthwise causal convolution
    norm: NormSpec
    gate: Literal["silu", "sigmoid"] = "silu"


@dataclass(frozen=True, slots=True)
class Pooled:
    """One shared key = value head: the last `window` rows and pooled entries of `ratio` rows each."""

    heads: int
    head_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    rope: str
    scale: float
    norm: NormSpec
    ratio: int = 0  # 0: no pooled entries
    index: IndexSpec | None = None


Mixer = Attention | Latent | Recurrent | Pooled


# ── feed-forward ────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Dense:
    """down(glu(gate x, up x))."""

    width: int
    glu: GluSpec = GluSpec()
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Router:
    """Which experts a token takes and with what weight.

    z = (W norm(s) + bias) * logit_scale in fp32; a = score(z); pick the top_k of a (+ choice_bias; of z for softmax);
    w = a[pick]; renorm: w /= sum + 1e-20; w *= scale; w *= expert_scale[pick].
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    renorm: bool = True
    scale: float = 1.0
    choice_bias: bool = False  # added for choosing only
    groups: int = 1  # contiguous groups, valued by the sum of their two best; groups not kept are set to -inf
    groups_kept: int = 1
    bias: bool = False
    norm: NormSpec | None = None
    logit_scale: float = 1.0
    expert_scale: bool = False
    table: bool = False  # pick = table[token id] instead


@dataclass(frozen=True, slots=True)
class Routed:
    """A sum over the chosen experts of weight * expert(x); the weight multiplies the output, after the down bias."""

    router: Router
    width: int
    glu: GluSpec = GluSpec()
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """One term of the feed-forward sum: s = residual or normed input; y = body(norm_in(s)) (* sigmoid(mix s));
    norm_out(y). A Routed body routes on s, not on norm_in(s)."""

    name: Literal["dense", "experts", "shared"]
    body: Dense | Routed
    source: Literal["normed", "residual"] = "normed"
    gated: bool = False
    norm_in: NormSpec | None = None
    norm_out: NormSpec | None = None


# ── residual and injections ─────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Plain:
    """x + scale * y, at both sublayers."""

    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class GatedStreams:
    """Several residual streams, mixed per channel by low-rank sigmoid gates; `close` replaces the final norm."""

    count: int
    rank: int
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class SinkhornStreams:
    """Manifold-constrained hyper-connections (arXiv 2512.24880): a Sinkhorn-normalised matrix mixes the streams."""

    count: int
    iters: int
    eps: float
    norm: NormSpec


Residual = Plain | GatedStreams | SinkhornStreams


@dataclass(frozen=True, slots=True)
class NGram:
    """Hashed n-gram embedding added before the mixer; row hashes need the preceding token ids."""

    order: int
    dim: int
    ngram: int
    heads: int
    base: int
    pad: int
    seed: int
    conv: int
    eos: int
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Per-layer token embedding added after the feed-forward."""

    width: int
    norm: NormSpec


# ── frame ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class LayerSpec:
    mixer: Mixer
    ffn: tuple[Branch, ...]  # a sum of branches
    pre_mixer: NormSpec | None
    pre_ffn: NormSpec | None
    post_mixer: NormSpec | None = None  # before the residual add
    post_ffn: NormSpec | None = None
    inject: NGram | TokenTable | None = None
    out_scale: bool = False


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    vocab: int
    scale: float = 1.0  # rounded to the model's dtype before it is used
    table_vocab: int = 0
    table_width: int = 0
    table_norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Order: norm, matmul, / divisor, softcap."""

    tied: bool = False
    norm: NormSpec | None = None
    divisor: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model. `layers` holds one LayerSpec per layer, already expanded: there are no patterns at run time."""

    hidden: int
    layers: tuple[LayerSpec, ...]
    embed: EmbeddingSpec
    head: HeadSpec
    ropes: Mapping[str, RopeSpec] = field(default_factory=dict)
    residual: Residual = Plain()
    max_positions: int = 0  # the trained window, tokens

    def routed(self) -> tuple[tuple[int, Routed], ...]:
        """(layer number, body) of every routed branch, in order."""
        return tuple(
            (i, branch.body)
            for i, layer in enumerate(self.layers)
            for branch in layer.ffn
            if isinstance(branch.body, Routed)
        )


def spec_faults(spec: ModelSpec) -> list[str]:
    """What is inconsistent inside `spec`, in words; empty when it can be built."""
    faults = []
    for i, layer in enumerate(spec.layers):
        mixer = layer.mixer
        rope = getattr(mixer, "rope", None)
        if rope is not None and rope not in spec.ropes:
            faults.append(f"layer {i} names rope {rope!r}, which is not among {sorted(spec.ropes)}")
        if isinstance(mixer, Attention):
            if mixer.heads % mixer.kv_heads:
                faults.append(f"layer {i}: {mixer.heads} heads do not divide into {mixer.kv_heads} key-value heads")
            if mixer.kv_from is not None and not _same_cache(spec, i, mixer.kv_from):
                faults.append(f"layer {i} reads the keys of layer {mixer.kv_from}, which is not an earlier twin")
        reuse = mixer.index.reuse if isinstance(mixer, Attention | Latent) and mixer.index else None
        if reuse is not None and not 0 <= reuse < i:
            faults.append(f"layer {i} reuses the selection of layer {reuse}, which is not earlier")
        for branch in layer.ffn:
            router = branch.body.router if isinstance(branch.body, Routed) else None
            if router and not (0 < router.top_k <= router.experts and router.experts % router.groups == 0):
                faults.append(f"layer {i}: top_k {router.top_k} of {router.experts} experts in {router.groups} groups")
    return faults


def _same_cache(spec: ModelSpec, layer: int, source: int) -> bool:
    if not 0 <= source < layer:
        return False
    mine, theirs = spec.layers[layer].mixer, spec.layers[source].mixer
    return (
        isinstance(mine, Attention)
        and isinstance(theirs, Attention)
        and theirs.kv_from is None
        and (mine.kv_heads, mine.head_dim, mine.window) == (theirs.kv_heads, theirs.head_dim, theirs.window)
    )
