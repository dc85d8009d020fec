"""The canonical tensors of a model, names and shapes, from its ModelSpec alone. Pure.

This is what a checkpoint must hold, exactly, and what the engine builds. Every linear is (out, in), every norm and bias
a vector; experts are separate tensors, because an expert is what moves.
Does not know how files spell or pack any of it (names.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from freetoken.catalog import ngram
from freetoken.catalog.spec import (
    Attention,
    Branch,
    Dense,
    GatedStreams,
    IndexSpec,
    Latent,
    ModelSpec,
    NGram,
    NormSpec,
    Pooled,
    Recurrent,
    Residual,
    Routed,
    Router,
    SinkhornStreams,
    TokenTable,
)

Shapes = dict[str, tuple[int, ...]]


def expected(spec: ModelSpec, layers: Iterable[int] | None = None) -> Shapes:
    """Canonical name -> shape; of the frame and these `layers` only, where given."""
    names = _Names(spec)
    names.frame()
    for number in range(len(spec.layers)) if layers is None else layers:
        names.layer(number)
    return names.shapes


def frame_shapes(spec: ModelSpec) -> Shapes:
    """What is outside all layers."""
    return expected(spec, ())


def layer_shapes(spec: ModelSpec, number: int) -> Shapes:
    """One layer without its routed experts: a thousand names less where only sizes are wanted."""
    names = _Names(spec, experts=False)
    names.layer(number)
    return names.shapes


def expert_shapes(spec: ModelSpec, body: Routed) -> Shapes:
    """One expert, the names below its own."""
    names = _Names(spec)
    names.glu("", body.width, body.bias)
    return {name.removeprefix("."): shape for name, shape in names.shapes.items()}


def expert_count(spec: ModelSpec) -> int:
    """Experts in all layers together: each has three matrices, so this bounds len(expected(spec)) cheaply."""
    return sum(body.router.experts for _, body in spec.routed())


class _Names:
    """Collects names and shapes on a walk through the spec."""

    def __init__(self, spec: ModelSpec, experts: bool = True) -> None:
        self.spec, self.experts = spec, experts
        self.hidden = spec.hidden
        self.shapes: Shapes = {}

    # ── leaves ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def linear(self, name: str, out: int, inputs: int, bias: bool = False) -> None:
        self.shapes[f"{name}.weight"] = (out, inputs)
        if bias:
            self.shapes[f"{name}.bias"] = (out,)

    def norm(self, name: str, norm: NormSpec | None, size: int) -> None:
        if norm is None:
            return
        if norm.weight:
            self.shapes[f"{name}.weight"] = (size,)
        if norm.kind == "layer":
            self.shapes[f"{name}.bias"] = (size,)

    def glu(self, name: str, width: int, bias: bool) -> None:
        self.linear(f"{name}.gate", width, self.hidden, bias)
        self.linear(f"{name}.up", width, self.hidden, bias)
        self.linear(f"{name}.down", self.hidden, width, bias)

    # ── frame ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def frame(self) -> None:
        embed, head = self.spec.embed, self.spec.head
        self.shapes["embed.weight"] = (embed.vocab, self.hidden)
        if not head.tied:
            self.shapes["head.weight"] = (embed.vocab, self.hidden)
        self.norm("head.norm", head.norm, self.hidden)
        if embed.table_width:
            width = len(self.spec.layers) * embed.table_width
            self.shapes["token_table.weight"] = (embed.table_vocab, width)
            self.linear("token_table.proj", width, self.hidden)
            self.norm("token_table.norm", embed.table_norm, embed.table_width)
        self.streams("streams_out", self.spec.residual, last=True)

    def streams(self, name: str, residual: Residual, last: bool = False) -> None:
        if isinstance(residual, GatedStreams):
            wide = residual.count * self.hidden
            self.norm(f"{name}.norm", residual.norm, wide)
            self.linear(f"{name}.down", residual.rank, wide)
            self.linear(f"{name}.up", wide, residual.rank)
            if not last:
                self.linear(f"{name}.inject", residual.count, wide)
        elif isinstance(residual, SinkhornStreams):
            count = residual.count
            rows = count if last else (2 + count) * count  # read; or read, write and mix
            self.shapes[f"{name}.fn"] = (rows, count * self.hidden)
            self.shapes[f"{name}.base"] = (rows,)
            self.shapes[f"{name}.scale"] = (1,) if last else (3,)

    def layer(self, number: int) -> None:
        layer, name = self.spec.layers[number], f"layers.{number}"
        for place in ("pre_mixer", "post_mixer", "pre_ffn", "post_ffn"):
            self.norm(f"{name}.{place}", getattr(layer, place), self.hidden)
        self.streams(f"{name}.mixer_streams", self.spec.residual)
        self.streams(f"{name}.ffn_streams", self.spec.residual)
        if layer.out_scale:
            self.shapes[f"{name}.out_scale"] = (1,)
        match layer.mixer:
            case Attention():
                self.attention(f"{name}.mixer", layer.mixer)
            case Latent():
                self.latent(f"{name}.mixer", layer.mixer)
            case Recurrent():
                self.recurrent(f"{name}.mixer", layer.mixer)
            case Pooled():
                self.pooled(f"{name}.mixer", layer.mixer)
        for branch in layer.ffn:
            self.branch(f"{name}.ffn.{branch.name}", branch)
        match layer.inject:
            case NGram():
                self.ngram(f"{name}.inject", layer.inject)
            case TokenTable():
                self.token_table(f"{name}.inject", layer.inject)

    # ── mixers ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def attention(self, name: str, mixer: Attention) -> None:
        queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        whole = mixer.qk_norm_scope == "all"
        self.linear(f"{name}.q", queries, self.hidden, mixer.qkv_bias)
        if mixer.out_gate:
            self.linear(f"{name}.gate", queries, self.hidden, mixer.qkv_bias)
        self.norm(f"{name}.q_norm", mixer.qk_norm, queries if whole else mixer.head_dim)
        if mixer.kv_from is None:
            self.linear(f"{name}.k", keys, self.hidden, mixer.qkv_bias)
            if not mixer.v_is_k:
                self.linear(f"{name}.v", keys, self.hidden, mixer.qkv_bias)
            self.norm(f"{name}.k_norm", mixer.qk_norm, keys if whole else mixer.head_dim)
            self.norm(f"{name}.v_norm", mixer.v_norm, mixer.head_dim)
        self.linear(f"{name}.o", self.hidden, queries, mixer.o_bias)
        if mixer.sinks:
            self.shapes[f"{name}.sinks"] = (mixer.heads,)
        self.index(f"{name}.index", mixer.index, self.hidden)

    def latent(self, name: str, mixer: Latent) -> None:
        queries = mixer.heads * (mixer.nope_dim + mixer.rope_dim)
        if mixer.q_rank is None:
            self.linear(f"{name}.q", queries, self.hidden)
        else:
            self.linear(f"{name}.q_a", mixer.q_rank, self.hidden, mixer.bias)
            self.norm(f"{name}.q_a_norm", mixer.norm, mixer.q_rank)
            self.linear(f"{name}.q_b", queries, mixer.q_rank)
        self.linear(f"{name}.kv_a", mixer.kv_rank + mixer.rope_dim, self.hidden, mixer.bias)
        self.norm(f"{name}.kv_a_norm", mixer.norm, mixer.kv_rank)
        self.linear(f"{name}.kv_b", mixer.heads * (mixer.nope_dim + mixer.v_dim), mixer.kv_rank)
        self.linear(f"{name}.o", self.hidden, mixer.heads * mixer.v_dim, mixer.bias)
        self.index(f"{name}.index", mixer.index, mixer.q_rank or self.hidden)

    def recurrent(self, name: str, mixer: Recurrent) -> None:
        keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
        self.linear(f"{name}.qkv", 2 * keys + values, self.hidden)
        self.linear(f"{name}.z", values, self.hidden)
        self.linear(f"{name}.b", mixer.value_heads, self.hidden)
        self.linear(f"{name}.a", mixer.value_heads, self.hidden)
        self.linear(f"{name}.o", self.hidden, values)
        self.shapes[f"{name}.conv.weight"] = (2 * keys + values, mixer.conv)
        self.shapes[f"{name}.a_log"] = (mixer.value_heads,)
        self.shapes[f"{name}.dt_bias"] = (mixer.value_heads,)
        self.norm(f"{name}.norm", mixer.norm, mixer.value_dim)

    def pooled(self, name: str, mixer: Pooled) -> None:
        queries = mixer.heads * mixer.head_dim
        self.linear(f"{name}.q_a", mixer.q_rank, self.hidden)
        self.norm(f"{name}.q_a_norm", mixer.norm, mixer.q_rank)
        self.linear(f"{name}.q_b", queries, mixer.q_rank)
        self.linear(f"{name}.kv", mixer.head_dim, self.hidden)
        self.norm(f"{name}.kv_norm", mixer.norm, mixer.head_dim)
        self.linear(f"{name}.o_a", mixer.o_groups * mixer.o_rank, queries // mixer.o_groups)
        self.linear(f"{name}.o_b", self.hidden, mixer.o_groups * mixer.o_rank)
        self.shapes[f"{name}.sinks"] = (mixer.heads,)
        if mixer.ratio:
            self.pool(f"{name}.pool", mixer, mixer.head_dim)
        if mixer.index:
            self.index(f"{name}.index", mixer.index, mixer.q_rank)
            self.pool(f"{name}.index.pool", mixer, mixer.index.dim)

    def pool(self, name: str, mixer: Pooled, dim: int) -> None:
        wide = 2 * dim if mixer.index else dim  # windows overlap where an index picks among their entries
        self.linear(f"{name}.kv", wide, self.hidden)
        self.linear(f"{name}.gate", wide, self.hidden)
        self.shapes[f"{name}.bias"] = (mixer.ratio, wide)
        self.norm(f"{name}.norm", mixer.norm, dim)

    def index(self, name: str, index: IndexSpec | None, query_inputs: int) -> None:
        if index is None or index.reuse is not None:
            return
        self.linear(f"{name}.q", index.heads * index.dim, query_inputs)
        if index.pick != "pooled":
            self.linear(f"{name}.k", index.dim, self.hidden)
            self.norm(f"{name}.k_norm", index.norm, index.dim)
        if index.pick in ("block_max", "block_mean"):
            self.norm(f"{name}.q_norm", index.norm, index.dim)
        else:
            self.linear(f"{name}.mix", index.heads, self.hidden)

    # ── feed-forward and injections ─────────────────────────────────────────────────────────────────────────────────
    def branch(self, name: str, branch: Branch) -> None:
        self.norm(f"{name}.norm_in", branch.norm_in, self.hidden)
        self.norm(f"{name}.norm_out", branch.norm_out, self.hidden)
        if branch.gated:
            self.linear(f"{name}.mix", 1, self.hidden)
        if isinstance(branch.body, Dense):
            self.glu(name, branch.body.width, branch.body.bias)
            return
        self.router(f"{name}.router", branch.body.router)
        for expert in range(branch.body.router.experts if self.experts else 0):
            self.glu(f"{name}.{expert}", branch.body.width, branch.body.bias)

    def router(self, name: str, router: Router) -> None:
        self.linear(name, router.experts, self.hidden, router.bias)
        if router.choice_bias:
            self.shapes[f"{name}.choice_bias"] = (router.experts,)
        if router.table:
            self.shapes[f"{name}.table"] = (self.spec.embed.vocab, router.top_k)
        if router.expert_scale:
            self.shapes[f"{name}.expert_scale"] = (router.experts,)
        self.norm(f"{name}.norm", router.norm, self.hidden)

    def ngram(self, name: str, inject: NGram) -> None:
        residual = self.spec.residual
        streams = residual.count if isinstance(residual, GatedStreams | SinkhornStreams) else 1
        wide = streams * self.hidden
        self.linear(f"{name}.key", wide, inject.dim)
        self.linear(f"{name}.value", self.hidden, inject.dim)
        for norm in ("key", "query", "conv"):
            self.norm(f"{name}.norm_{norm}", inject.norm, wide)
        self.shapes[f"{name}.conv.weight"] = (wide, inject.conv)
        self.shapes[f"{name}.table"] = ngram.table_shape(inject)

    def token_table(self, name: str, inject: TokenTable) -> None:
        self.linear(f"{name}.gate", inject.width, self.hidden)
        self.linear(f"{name}.proj", self.hidden, inject.width)
        self.norm(f"{name}.norm", inject.norm, self.hidden)
