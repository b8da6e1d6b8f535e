"""How a model's hidden states become one vector, after the files that sentence-transformers saves.

    modules.json           [{"path": "", ...Transformer}, {"path": "1_Pooling", ...Pooling}, {... "Normalize"}]
    1_Pooling/config.json  {"pooling_mode_mean_tokens": true, ...}

Without them the last token's state is taken, which in a decoder has seen all of the text. Vectors are always
brought to length 1. Source: sentence-transformers, `models.Pooling`.
"""

import json
from pathlib import Path
from typing import Any, Literal

import structlog

log = structlog.get_logger(__name__)

Pooling = Literal["", "mean", "last", "cls"]
"""Of all tokens, of the last, of the first; empty: the model's is none of these."""
_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}
_NAMES: dict[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
_KNOWN = ("Transformer", "Pooling", "Normalize")


def read_pooling(directory: Path) -> Pooling:
    """The pooling of the model in `directory`; empty, with a word in the log, where it is not one of ours."""
    try:
        modules = _modules(directory)
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        if "Pooling" not in kinds:
            return "last"
        others = [kind for kind in kinds if kind not in _KNOWN]
        if others:
            log.warning("no_embeddings", reason=f"the model has modules that are not served: {others}")
            return ""
        place = directory / str(modules[kinds.index("Pooling")]["path"])
        found = _mode(json.loads((place / "config.json").read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("no_embeddings", reason=f"the files of sentence-transformers cannot be read: {error}")
        return ""
    if not found:
        log.warning("no_embeddings", reason="the model pools in a way that is not served")
    return found


def _modules(directory: Path) -> list[dict[str, Any]]:
    path = directory / "modules.json"
    return list(json.loads(path.read_bytes())) if path.is_file() else []


def _mode(config: dict[str, Any]) -> Pooling:
    if "pooling_mode" in config:
        return _NAMES.get(str(config["pooling_mode"]), "")
    chosen = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    return _MODES.get(chosen[0], "") if len(chosen) == 1 else ""
