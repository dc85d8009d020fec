"""From a ModelSpec to a Decoder with unfilled weights, or a refusal that names what this build cannot compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from freetoken.catalog.spec import Attention, ModelSpec, Plain, spec_faults
from freetoken.core.errors import ConfigInvalid, UnsupportedArchitecture
from freetoken.engine.attention.table import ATTENTION
from freetoken.engine.layers.module import Weights
from freetoken.engine.layers.rope import Ropes
from freetoken.engine.models.decoder import Decoder
from freetoken.engine.quant.table import WEIGHT_DTYPES


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder, the positions it understands, and where its weights go."""

    spec: ModelSpec
    decoder: Decoder
    ropes: Ropes
    destinations: dict[str, Tensor]  # canonical name -> view to fill

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return sum(view.nbytes for view in self.destinations.values())


def build(spec: ModelSpec, *, weight_dtype: str, context: int, attention: str = "sdpa") -> Model:
    """Allocate the model; `context` (tokens) is the longest sequence planned.

    Raises ConfigInvalid where the spec contradicts itself, UnsupportedArchitecture where a part of it is not built.
    """
    if faults := spec_faults(spec):
        raise ConfigInvalid(f"the model's configuration contradicts itself: {faults[0]}")
    if missing := sorted(set(_unbuilt(spec))):
        raise UnsupportedArchitecture(
            f"this model needs {', '.join(missing)}, which this version cannot compute",
            fixes=("choose a model of a supported family",),
        )
    weights = Weights(WEIGHT_DTYPES[weight_dtype])
    decoder = Decoder(spec, weights, ATTENTION[attention])
    return Model(spec, decoder, Ropes(spec.ropes, context), weights.destinations())


def _unbuilt(spec: ModelSpec) -> Iterator[str]:
    if not isinstance(spec.residual, Plain):
        yield f"the residual {type(spec.residual).__name__}"
    if spec.embed.table_width:
        yield "the per-layer token table"
    for layer in spec.layers:
        if not isinstance(layer.mixer, Attention):
            yield f"the mixer {type(layer.mixer).__name__}"
        elif layer.mixer.index is not None:
            yield f"the index {layer.mixer.index.pick}"
        elif layer.mixer.kv_from is not None:
            yield "keys shared between layers"
        if layer.inject is not None:
            yield f"the injection {type(layer.inject).__name__}"
