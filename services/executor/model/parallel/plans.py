"""How each architecture's layers are split over the ranks: parallel plans as data (`families/plans.py`).

A family declares its plan where transformers has none, or one that gathers what need not be gathered. Most plans are
transformers' own: `base_model_tp_plan`, read as data and translated here.
"""

import re
from typing import Any

from services.executor.families.plans import QKV, Plan, Style
from services.executor.families.registry import family_of
from shared.errors import ModelLoadError


def plan_for(config: Any) -> Plan:
    """The plan of the architecture of this transformers text configuration.

    Raises `ModelLoadError` when there is none, or when it names a style that is not known: a layer that is
    silently replicated computes nonsense as soon as its neighbour is split.
    """
    own = family_of(config.model_type).plan
    if own is not None:
        return own
    theirs = getattr(config, "base_model_tp_plan", None)
    if not theirs:
        raise ModelLoadError(
            f"The architecture {config.model_type!r} has no parallel plan and is not served; "
            "choose a model of another architecture (docs/models.md lists them)."
        )
    return {
        key.removeprefix(_LAYERS): _translated(key, style)
        for key, style in theirs.items()
        if key.startswith(_LAYERS)  # embeddings and the output layer are split by vocabulary, whatever it says
    }


def as_regex(pattern: str) -> re.Pattern[str]:
    """Matches the full names, relative to the base model, of the modules that `pattern` means."""
    return re.compile(r"(?:.+\.)?\d+\." + re.escape(pattern).replace(r"\*", r"[^.]+"))


_LAYERS = "layers.*."
_COLUMNS = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_ROWS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_WHOLE = frozenset({"replicated", "replicate", "replicated_with_grad_allreduce"})
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"})
_ATTENTION_ROWS = frozenset({"o_proj", "out_proj", "dense"})
_EXPERT_PARAMETERS = (".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")


def _translated(key: str, style: str) -> Style:
    """The meaning of one line of a plan of transformers. Source: transformers, `integrations/tensor_parallel`."""
    if style in _WHOLE or key.endswith(_EXPERT_PARAMETERS):  # what experts hold follows from their own line
        return Style.WHOLE
    if style == "moe_tp_experts":
        return Style.EXPERTS
    inside, leaf = ("attn" in key or "attention" in key), key.rpartition(".")[2]
    translated: Style | None = None
    if inside:
        if style in _COLUMNS:
            translated = QKV.get(leaf)
        elif style in _ROWS and leaf in _ATTENTION_ROWS:
            translated = Style.OUTPUT
    elif style not in _GATHERED and style in _COLUMNS:
        translated = Style.COLUMN
    elif style not in _GATHERED and style in _ROWS:
        translated = Style.ROW
    if translated is None:
        raise ModelLoadError(
            f"The model's parallel plan names the style {style!r} for {key}, which is not served; "
            "choose a model of another architecture (docs/models.md lists them)."
        )
    return translated
