"""How a model makes one vector, or the scores of its classes, of a text: after the files that sentence-transformers
saves, and after config.json.

    modules.json                       [{"path": "", ...Transformer}, {"path": "1_Pooling", ...Pooling}, ... Normalize]
    1_Pooling/config.json              {"pooling_mode_mean_tokens": true, ...}
    2_Dense/config.json                {"in_features": 768, "activation_function": "torch.nn.modules.activation.Tanh"}
    sentence_bert_config.json          {"max_seq_length": 512}
    config_sentence_transformers.json  {"prompts": {"query": "query: "}, "default_prompt_name": null}

Sources: sentence-transformers, `models.Pooling`, `models.Dense`, `CrossEncoder.get_default_activation_fn`; vLLM for the
names of matryoshka lengths. Free of torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import structlog

from shared import limits
from shared.errors import ModelLoadError

log = structlog.get_logger(__name__)

# Of all tokens, of the last, of the first; empty: the model's is none of these.
Pooling = Literal["", "mean", "last", "cls"]
_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
_NAMES: dict[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_KNOWN = ("Transformer", "Pooling", "Normalize")
_BEHIND_DENSE = frozenset({"GELU", "Identity", "ReLU", "SiLU", "Sigmoid", "Tanh"})
_WIDEST = 1 << 20
_LABEL = 128  # characters of a class's name that are told
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity"}
_OF_PROBLEM = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


class Dense(NamedTuple):
    """A layer behind the pooling."""

    directory: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str  # name of a class in `torch.nn`: one of `_BEHIND_DENSE`


class VectorFacts(NamedTuple):
    """How a model embeds."""

    pooling: Pooling
    normalized: bool = True  # whether vectors are brought to length 1
    dense: tuple[Dense, ...] = ()


NO_VECTORS = VectorFacts("")


def read_vectors(directory: Path, *, default: Pooling = "last", dense: bool = False) -> VectorFacts:
    """How the model in `directory` embeds; `NO_VECTORS`, with a word in the log, where that is not served. `default`:
    its pooling where no file says; `dense`: layers behind the pooling are served."""
    try:
        modules = _modules(directory)
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        if "Pooling" not in kinds:
            return VectorFacts(default)
        others = [kind for kind in kinds if kind not in _KNOWN and not (dense and kind == "Dense")]
        if others:
            return _none(f"the model has modules that are not served: {others}")
        config = _json(directory / str(modules[kinds.index("Pooling")]["path"]) / "config.json")
        pooling = _mode(config)
        layers = [
            _dense(directory / str(module["path"]))
            for module, kind in zip(modules, kinds, strict=True)
            if kind == "Dense"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _none(f"the files of sentence-transformers cannot be read: {error}")
    if not pooling:
        return _none("the model pools in a way that is not served")
    return VectorFacts(pooling, "Normalize" in kinds, tuple(layers))


def _none(reason: str) -> VectorFacts:
    log.warning("no_embeddings", reason=reason)
    return NO_VECTORS


def _modules(directory: Path) -> list[dict[str, Any]]:
    path = directory / "modules.json"
    return list(json.loads(path.read_bytes())) if path.is_file() else []


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes()))


def _mode(config: dict[str, Any]) -> Pooling:
    if config.get("include_prompt") is False:
        return ""  # which of its tokens are the prompt's is not known behind the gateway
    if "pooling_mode" in config:
        return _NAMES.get(str(config["pooling_mode"]), "")
    chosen = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    return _MODES.get(chosen[0], "") if len(chosen) == 1 else ""


def _dense(directory: Path) -> Dense:
    config = _json(directory / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    module, _, name = activation.rpartition(".")
    if not module.startswith("torch.nn.modules") or name not in _BEHIND_DENSE:
        raise ValueError(f"the activation {activation[:100]} is not served")
    inputs, outputs = int(config["in_features"]), int(config["out_features"])
    if not (0 < inputs <= _WIDEST and 0 < outputs <= _WIDEST):
        raise ValueError(f"{directory.name} makes {outputs} numbers of {inputs}")
    return Dense(directory, inputs, outputs, bool(config.get("bias", True)), name)


def most_tokens(directory: Path) -> int | None:
    """Tokens to which sentence-transformers cuts a text; None: no file says."""
    path = directory / "sentence_bert_config.json"
    if not path.is_file():
        return None
    try:
        length = _json(path).get("max_seq_length")
    except (OSError, ValueError, TypeError) as error:
        raise ModelLoadError(f"The file {path} cannot be read ({error}); fetch the model again.") from None
    return length if isinstance(length, int) and length > 0 else None


def read_prompts(directory: Path) -> tuple[dict[str, str], str]:
    """(prompts by name, the default's name) that sentence-transformers puts before texts. Files that hold none, or
    others than texts, have none."""
    path = directory / "config_sentence_transformers.json"
    if not path.is_file():
        return {}, ""
    try:
        config = _json(path)
        prompts = {str(name): str(text) for name, text in dict(config.get("prompts") or {}).items()}
    except (OSError, ValueError, TypeError) as error:
        raise ModelLoadError(f"The file {path} cannot be read ({error}); fetch the model again.") from None
    size = sum(len(name) + len(text) for name, text in prompts.items())
    if size > limits.MODEL_PROMPTS.value:
        raise ModelLoadError(
            f"The prompts in {path} have {size:,} characters ({limits.MODEL_PROMPTS.cited()}); shorten them."
        )
    default = config.get("default_prompt_name")
    return prompts, default if isinstance(default, str) and default in prompts else ""


def matryoshka_dimensions(config: Mapping[str, Any]) -> list[int] | None:
    """Lengths that vectors may be cut to, as config.json says; None: it does not say, empty: none."""
    lengths = config.get("matryoshka_dimensions")
    if isinstance(lengths, list):
        return sorted(length for length in lengths if isinstance(length, int) and length > 0)
    return [] if config.get("is_matryoshka") is False else None


# --- classes -------------------------------------------------------------------------------------


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether config.json, here read, names a model with a sequence-classification head."""
    named = config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith("ForSequenceClassification") for name in named)


def labels_of(config: Any) -> list[str]:
    """The classes of a transformers configuration, in the order of their logits. Raises `ModelLoadError` where there
    are too many."""
    if config.num_labels > limits.MODEL_LABELS.value:
        raise ModelLoadError(
            f"The model has {config.num_labels:,} classes, and no more than {limits.MODEL_LABELS.value:,} are served "
            f"({limits.MODEL_LABELS.cited()}); choose another model."
        )
    return [str(config.id2label.get(at, f"LABEL_{at}"))[:_LABEL] for at in range(config.num_labels)]


def activation_of(config: Any) -> str:
    """What makes scores of logits: as sentence-transformers' cross-encoders say, else by the problem's type, else the
    sigmoid of one and the softmax of several. Raises `ModelLoadError` for one that is not known."""
    named = getattr(config, "sentence_transformers", None) or {}
    given = named.get("activation_fn") if isinstance(named, dict) else None
    given = given or getattr(config, "sbert_ce_default_activation_function", None)
    if given is not None:
        found = _ACTIVATIONS.get(str(given).rpartition(".")[2])
        if found is None or not str(given).startswith("torch.nn.modules."):
            raise ModelLoadError(
                f"The model makes scores by {str(given)[:100]!r}, which is not served; "
                f"choose one that does by {', '.join(_ACTIVATIONS)} of torch.nn."
            )
        return found
    problem = getattr(config, "problem_type", None)
    return _OF_PROBLEM.get(str(problem), "sigmoid" if config.num_labels == 1 else "softmax")
