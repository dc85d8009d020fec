"""The one decoder block and the one stack: catalog.spec's pseudo-code with weights. Does not know families or files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from freetoken.catalog.spec import Attention, Branch, Dense, LayerSpec, ModelSpec, Plain
from freetoken.engine.attention.base import Attend
from freetoken.engine.kv.base import KvCache
from freetoken.engine.layers.attention import AttentionLayer
from freetoken.engine.layers.embedding import Embedding, Head
from freetoken.engine.layers.linear import Linear
from freetoken.engine.layers.mlp import DenseFfn
from freetoken.engine.layers.module import Inputs, Weights
from freetoken.engine.layers.moe import RoutedFfn
from freetoken.engine.layers.norm import Norm, optional_norm


class FfnBranch:
    """One term of the feed-forward sum."""

    def __init__(self, spec: Branch, hidden: int, vocab: int, weights: Weights) -> None:
        self._spec = spec
        self._norm_in = optional_norm(spec.norm_in, hidden, weights / "norm_in")
        self._norm_out = optional_norm(spec.norm_out, hidden, weights / "norm_out")
        self._mix = Linear({"mix": 1}, hidden, weights) if spec.gated else None
        self._body: DenseFfn | RoutedFfn = (
            DenseFfn(spec.body, hidden, weights)
            if isinstance(spec.body, Dense)
            else RoutedFfn(spec.body, hidden, vocab, weights)
        )

    def __call__(self, residual: Tensor, normed: Tensor, token_ids: Tensor) -> Tensor:
        """residual, normed (tokens, hidden) f32, token_ids (tokens) i64 -> (tokens, hidden) f32."""
        source = residual if self._spec.source == "residual" else normed
        x = _normed(self._norm_in, source)
        y = self._body(x) if isinstance(self._body, DenseFfn) else self._body(x, source, token_ids)
        if self._mix is not None:
            y = y * self._mix(source).sigmoid()
        return _normed(self._norm_out, y)

    @property
    def routed(self) -> RoutedFfn | None:
        return self._body if isinstance(self._body, RoutedFfn) else None


class Block:
    """Mixer and feed-forward, each on a normed copy and added to the residual stream."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, weights: Weights, attend: Attend) -> None:
        assert isinstance(spec.mixer, Attention) and isinstance(model.residual, Plain)
        hidden = model.hidden
        self._scale = model.residual.scale
        self._mixer = AttentionLayer(spec.mixer, hidden, weights / "mixer", attend)
        self.branches = [FfnBranch(b, hidden, model.embed.vocab, weights / f"ffn.{b.name}") for b in spec.ffn]
        self._pre_mixer = optional_norm(spec.pre_mixer, hidden, weights / "pre_mixer")
        self._post_mixer = optional_norm(spec.post_mixer, hidden, weights / "post_mixer")
        self._pre_ffn = optional_norm(spec.pre_ffn, hidden, weights / "pre_ffn")
        self._post_ffn = optional_norm(spec.post_ffn, hidden, weights / "post_ffn")
        self._out_scale = weights.vector("out_scale", 1) if spec.out_scale else None  # (1) f32

    def __call__(self, x: Tensor, inputs: Inputs, cache: KvCache, rows: Tensor | None = None) -> Tensor:
        """x (tokens, hidden) f32, overwritten -> (tokens, hidden) f32; of `rows` only, where given."""
        mixed = self._mixer(_normed(self._pre_mixer, x), inputs, cache)
        x = x.add_(_normed(self._post_mixer, mixed), alpha=self._scale)
        token_ids = inputs.token_ids
        if rows is not None:
            x, token_ids = x[rows], token_ids[rows]
            if not len(rows):
                return x
        normed = _normed(self._pre_ffn, x)
        first, *rest = (branch(x, normed, token_ids) for branch in self.branches)
        x = x.add_(_normed(self._post_ffn, sum(rest, first)), alpha=self._scale)
        return x if self._out_scale is None else x.mul_(self._out_scale)


class Decoder:
    """A whole model: embedding, blocks, head."""

    def __init__(self, spec: ModelSpec, weights: Weights, attend: Attend) -> None:
        self._vocab = spec.embed.vocab
        self._embed = Embedding(spec.embed, spec.hidden, weights)
        self._blocks = [Block(layer, spec, weights / f"layers.{i}", attend) for i, layer in enumerate(spec.layers)]
        self._head = Head(spec.head, self._embed, weights)

    def __call__(self, inputs: Inputs, caches: Sequence[KvCache]) -> Tensor:
        """-> (rows, vocab) f32, the logits after each of `inputs.rows`; one cache a layer."""
        x = self._embed(inputs.token_ids)  # (tokens, hidden) f32
        *blocks, last = zip(self._blocks, caches, strict=True)
        for block, cache in blocks:
            x = block(x, inputs, cache)
        # nothing reads the last feed-forward of a token whose logits nobody wants
        block, cache = last
        x = block(x, inputs, cache, inputs.rows)
        return self._head(x) if len(x) else x.new_empty(0, self._vocab)

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Tokens routed since the load, by routed layer and expert; in the last layer only those that are sampled."""
        return tuple(tuple(body.tokens.tolist()) for body in self._routed())

    def clear_counts(self) -> None:
        for body in self._routed():
            body.tokens.zero_()

    def _routed(self) -> Iterator[RoutedFfn]:
        return (body for block in self._blocks for branch in block.branches if (body := branch.routed) is not None)


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
