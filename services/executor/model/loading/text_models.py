"""The text model within a model that takes more than text: its configuration, and the names of its tensors.

    config.json              {"model_type": "gemma3", "text_config": {...}, "vision_config": {...}}
    tensors of its file      model.language_model.layers.0...   or   language_model.model.layers.0...   lm_head.weight
    the text model's own     model.layers.0...                                                          lm_head.weight

What else the file holds (a vision tower, a projector) is not read. A few configurations are flat: the text model's
settings stand beside those of its other parts, and its tensors have their own names.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

# Attribute of a text model's configuration: the `model_type` of the model that it was part of.
_WHOLE = "text_of"
_WITHIN = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.+)")
# How the names of tensors begin that the text model calls the same: its head, and all of it in Qwen's files.
_AS_THEY_ARE = ("lm_head.", "model.layers.", "model.embed_tokens.", "model.norm.")
# Text models that are another type's for texts alone, whose positions are the same in each dimension of an image.
_SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_FLAT = {"phi4_multimodal": "phi3"}  # types of flat configurations, and those of their text models
# Types in whose checkpoints the text model's tensors have their own names.
_OWN_NAMES = frozenset({*_FLAT, "dots3_note"})
# What the tensors of other parts are called there.
_OTHER_PARTS = ("model.embed_tokens_extend.", "audio_encoder.", "vision_encoder.")


def know_causal(config: Any) -> None:
    """Lets transformers build the causal language model of a text configuration that it lists among models that take
    images alone (Mistral 4's)."""
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if model is not None and model.__name__.endswith("ForCausalLM"):
        AutoModelForCausalLM.register(type(config), model, exist_ok=True)


def takes_more_than_text(config: Any) -> bool:
    """Whether the model of `config` has a text model among other parts."""
    return config.model_type in _FLAT or config.get_text_config() is not config


def text_config(config: Any, described: Mapping[str, Any]) -> Any:
    """The configuration of the text model within that of `config`, whose config.json says `described`."""
    text = config if config.model_type in _FLAT else config.get_text_config()
    if other := _FLAT.get(config.model_type, _SAME.get(text.model_type)):
        text = _as_type(other, text.to_dict())
    causal = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if causal is not None and causal.config_class is type(text):
        AutoModelForCausalLM.register(type(text), causal, exist_ok=True)  # not every text model has a type of its own
    inner = described.get("text_config") or {}
    tied = described.get("tie_word_embeddings", inner.get("tie_word_embeddings"))
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", False) if tied is None else tied
    for shared in ("dtype", "quantization_config"):
        if getattr(text, shared, None) is None:
            setattr(text, shared, getattr(config, shared, None))
    setattr(text, _WHOLE, config.model_type)
    return text


def _as_type(model_type: str, settings: Mapping[str, Any]) -> Any:
    """The configuration of that type which `settings`, of another, say. How the dimensions of an image share the
    rotation is left out."""
    kind = CONFIG_MAPPING[model_type]
    own = kind().to_dict().keys() - {"model_type"}
    taken = {name: value for name, value in settings.items() if name in own}
    if rope := taken.get("rope_parameters"):
        taken["rope_parameters"] = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    return kind(**taken)


def whole_of(config: Any) -> str | None:
    """The `model_type` of the model whose text model this is the configuration of; None: it is no part."""
    whole: str | None = getattr(config, _WHOLE, None)
    return whole


def text_names(config: Any, names: Iterable[str]) -> dict[str, str]:
    """What the text model calls those of a checkpoint's tensors `names` that are its own."""
    if whole_of(config) is None:
        return {name: name for name in names}
    if whole_of(config) in _OWN_NAMES:
        return {name: name for name in names if not name.startswith(_OTHER_PARTS)}
    return {name: own for name in names if (own := _own(name)) is not None}


def _own(name: str) -> str | None:
    within = _WITHIN.fullmatch(name)
    inside = name if within is None else within[1]
    if inside.startswith(_AS_THEY_ARE):
        return inside
    return None if within is None else f"model.{inside}"
