"""Which models are served, and why others are not; docs/models.md has tables of them.

An architecture that is not declared (`families/registry.py`) is refused at load, because a model that computes
something else than its authors meant answers without an error. A model is refused by its configuration alone, with the
reason, before a byte of its weights is read.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.executor.families.family import ModelFamily
from services.executor.families.registry import DECODERS, ENCODERS, family_of
from services.executor.model.states.catalog import state_kind
from shared.errors import ModelLoadError


@dataclass(frozen=True)
class Unsupported:
    """Architectures that are not served for one reason."""

    because: str  # ends the sentence "its architecture ..."
    model_types: list[str]


# Models that take more than text, of which the text model is served: images and sound are refused.
TEXT_ALONE = frozenset(
    {
        "aria",
        "cohere_compass",
        "dots3_note",
        "emu3",
        "exaone4_5",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "internvl",
        "kimi_k25",
        "lfm2_vl",
        "llama4",
        "minimax_m3_vl",
        "mistral3",
        "phi4_multimodal",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
    }
)
# All other types of transformers' causal language models, each once.
REFUSED: tuple[Unsupported, ...] = (
    Unsupported("adds what its query gives to the distance of the key to each score, behind convolutions", [
        "inkling2_text", "inkling_text"
    ]),
    Unsupported("weighs tokens by hashes or by two streams of the text, which keys and values alone do not tell", [
        "reformer", "xlnet"
    ]),
    Unsupported("drafts for another model, whose keys and values it reads", [
        "gemma4_assistant", "gemma4_unified_assistant"
    ]),
    Unsupported("reads bytes, and attends to the patches that an encoder makes of them", [
        "blt"
    ]),
    Unsupported("is the decoder of a model with an encoder, whose states it attends to", [
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mllama", "musicgen",
        "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper"
    ]),
    Unsupported("answers images or sound, and no text alone", [
        "fuyu", "git", "got_ocr2", "moshi", "moss_transcribe_diarize"
    ]),
    Unsupported("reads text in both directions, and is not among the encoders that are served", [
        "bert-generation", "big_bird", "cpmant", "megatron-bert", "rembert", "roc_bert", "roformer", "xlm", "xmod"
    ]),
    Unsupported("reads its prompt in both directions (prefix_lm)", [
        "hrm_text"
    ]),
)  # fmt: skip


def is_encoder(described: Mapping[str, Any]) -> bool:
    """Whether what config.json, here read, describes reads texts in both directions, and is served so."""
    kind = described.get("model_type")
    both_ways = family_of(kind).embeds_both_ways
    return kind in ENCODERS or (both_ways and described.get("use_bidirectional_attention") is True)


def refusal_of(model_type: str) -> str | None:
    """Why the architecture is not served, as the end of "its architecture ..."; None where it is."""
    if family_of(model_type).row:
        return None
    for refusal in REFUSED:
        if model_type in refusal.model_types:
            return refusal.because
    return "is not among those proven to compute what transformers computes (docs/models.md lists them)"


_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Tokens of a sequence of theirs: they have no limit of their own, and blocks to count tokens by are set aside.
_LONGEST_STATE = 1 << 17
# What configurations call the most tokens of one sequence, the commonest first (BLOOM: seq_length).
_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len")
ORIGINAL_LENGTH = "original_max_position_embeddings"


# Sizes of which a model is built before its weights are looked at, in the words of config.json and of GGUF files.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "block_count"), 4096),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "expert_count"), 1 << 16),
    **dict.fromkeys(("hidden_size", "n_embd", "head_dim", "embedding_length", "key_length"), 1 << 20),
}


def check_sizes(settings: Mapping[str, Any]) -> None:
    """Raises `ModelLoadError` where `settings`, of config.json or a GGUF file, takes time or memory without end."""
    for key, value in settings.items():
        if isinstance(value, dict):
            check_sizes(value)
        most = _MOST.get(key.rpartition(".")[2])
        if most is not None and isinstance(value, int | float) and not value <= most:
            raise ModelLoadError(
                f"The model says that its {key} is {value}, and no model with more than {most} is served; its "
                "configuration is damaged, fetch it again."
            )


def check_supported(config: Any) -> None:
    """Raises `ModelLoadError`, with the reason, when the model of this text configuration is not served."""
    for reason in _reasons(config):
        raise ModelLoadError(
            f"The model cannot be served: its architecture {config.model_type!r} {reason}; "
            f"choose another model{nearest(config.model_type)}."
        )


def check_text_served(config: Any) -> None:
    """Raises `ModelLoadError` where a model that takes more than text, of this configuration, is not served."""
    if config.model_type not in TEXT_ALONE:
        raise ModelLoadError(
            f"The model takes more than text ({config.model_type!r}), and its text model alone is not served; "
            f"choose a text model, or one of {', '.join(sorted(TEXT_ALONE))}{nearest(config.model_type)}."
        )


_LIKE = 0.75  # how alike names are that are worth naming, from 0 to 1; of one family they begin alike


def nearest(model_type: str) -> str:
    """The served architecture whose name is most like `model_type`, as the end of an error's sentence; "" where none
    is."""
    likeness = {name: _likeness(model_type.lower(), name, row) for name, row in DECODERS.items()}
    name = max(likeness, key=lambda name: likeness[name])
    if likeness[name] < _LIKE:
        return ""
    return f" (the nearest that is served: {DECODERS[name].title}, {name!r}, such as {DECODERS[name].examples})"


def _likeness(wanted: str, name: str, row: ModelFamily) -> float:
    names = (name, row.title.lower(), *row.examples.lower().split(", "))
    likeness = max(difflib.SequenceMatcher(None, wanted, other).ratio() for other in names)
    of_family = _family(wanted) == _family(name)
    return likeness + of_family


def _family(name: str) -> str:
    found = re.match(r"[a-z]+", name)
    return found[0] if found else name


def longest_context(config: Any) -> int:
    """Most tokens of one sequence, where nothing else is set. Raises `ModelLoadError` where the configuration does not
    say.

    Doge chooses, of more than keep_window_size keys, those with the largest biases. A model without attention to all
    of a text takes any length.
    """
    family = family_of(config.model_type)
    if family.unlimited or family.state_heads:
        return _LONGEST_STATE
    length = next((value for name in _LENGTHS if (value := getattr(config, name, None))), None)
    if not isinstance(length, int) or length < 1:
        raise ModelLoadError("The model's config.json has no max_position_embeddings; add it.")
    kept = getattr(config, "keep_window_size", None)
    if isinstance(kept, int) and kept > 0:
        length = min(length, kept)
    return length


_OFF = (None, False, "single")


def _reasons(config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "has an encoder"
    if getattr(config, "add_cross_attention", False):
        yield "attends to an encoder"
    family, kind = family_of(config.model_type), state_kind(config.model_type)
    if not (kind is not None and kind.has_latents) and getattr(config, "kv_lora_rank", None):
        yield "has no latent attention, but its configuration does (kv_lora_rank)"
    looks_ahead = getattr(config, "use_bidirectional_attention", None)
    if looks_ahead not in (None, False, "vision") and not family.embeds_both_ways:  # vision: of images alone
        yield "looks ahead in the text (use_bidirectional_attention)"
    for setting, reason in family.unserved.items():
        if getattr(config, setting) not in _OFF:
            yield f"{reason} ({setting})"
    more = family.layer_types or (kind.layer_types if kind is not None else ())
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES.union(more))
    if more and not getattr(config, "layer_types", None):
        yield "has layers of several types, and its config.json no layer_types"
    if unknown:
        yield f"has layers of type {', '.join(unknown)}"
    refusal = _of_encoder(config) or refusal_of(config.model_type)
    if refusal:
        yield refusal


def _of_encoder(config: Any) -> str | None:
    made = config.model_type in ENCODERS and getattr(config, "is_decoder", False)
    return "is an encoder's, made to read in one direction (is_decoder)" if made else None


def ropes_of(config: Any) -> Iterator[dict[str, Any]]:
    """The parameters of each rotary embedding, whether the configuration has one or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]
