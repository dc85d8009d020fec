"""THE table of model families, by config.json's model_type. Pure.

Adding a family is one row here and, where no reader fits, one file beside this one.
"""

from __future__ import annotations

from freetoken.catalog.families.llama import read_dense
from freetoken.catalog.families.mixtral import read_mixtral
from freetoken.catalog.families.qwen3_moe import read_qwen3_moe
from freetoken.catalog.family import Family
from freetoken.catalog.hf import Config
from freetoken.core.errors import UnsupportedArchitecture

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", ("LlamaForCausalLM",), read_dense),
        Family("mistral", ("MistralForCausalLM", "Mistral3ForConditionalGeneration"), read_dense),
        Family("mixtral", ("MixtralForCausalLM",), read_mixtral),
        Family("qwen2", ("Qwen2ForCausalLM",), read_dense),
        Family("qwen3", ("Qwen3ForCausalLM",), read_dense),
        Family("qwen3_moe", ("Qwen3MoeForCausalLM",), read_qwen3_moe),
    )
}


def find_family(config: Config) -> tuple[Family, Config]:
    """The family of a config.json and the part of it that describes the text model.

    Raises UnsupportedArchitecture, naming what is supported.
    """
    text = config.section("text_config") or config
    model_type, architectures = text.text("model_type", ""), config.texts("architectures")
    family = FAMILIES.get(model_type)
    if family is None or (architectures and not set(architectures) & set(family.architectures)):
        raise unsupported(architectures[0] if architectures else model_type)
    outer = {key: config.values[key] for key in ("tie_word_embeddings",) if config.values.get(key) is not None}
    return family, Config({**text.values, **outer}, text.where)


def unsupported(name: str) -> UnsupportedArchitecture:
    """The error for an architecture that no row describes."""
    return UnsupportedArchitecture(
        f"architecture {name[:80]!r} is not supported; supported are {', '.join(FAMILIES)}",
        fixes=(f"choose a model of one of these families: {', '.join(FAMILIES)}",),
    )
