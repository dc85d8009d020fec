"""What a model's author recommends for sampling: generation_config.json, under SamplingParams' names. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from freetoken.catalog.hf import Config

SamplingDefaults = Mapping[str, float | int]


def sampling_defaults(config: Config) -> SamplingDefaults:
    """temperature, top_k, top_p, min_p and repetition_penalty, as far as the file gives them.

    do_sample: false is an author's choice of greedy decoding, so it becomes temperature 0 and leaves only the penalty;
    absent, the other fields count as given. Raises ConfigInvalid for values that mean nothing.
    """
    defaults: dict[str, float | int] = {}
    if config.has("repetition_penalty"):
        defaults["repetition_penalty"] = config.number("repetition_penalty", 1.0)
    if not config.flag("do_sample", True):
        return defaults | {"temperature": 0.0}
    for key, neutral in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0)):
        if config.has(key):
            defaults[key] = config.number(key, neutral, least=0)
    for key in ("top_p", "min_p"):
        if defaults.get(key, 0) > 1:
            raise config.invalid(key, defaults[key], "a probability")
    if config.has("top_k"):
        defaults["top_k"] = max(0, config.integer("top_k", 0, least=-1))  # -1 also means "no limit"
    return defaults
