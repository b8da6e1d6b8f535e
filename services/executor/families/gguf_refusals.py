"""Why files of an architecture that has no row in `gguf_architectures.py` are not served. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping

from services.executor.families.gguf import GgufArchitecture

_ENCODER_DECODER = "an encoder writes its prompts into a decoder, and such models are not served"
_PICTURES = "what it has for pictures lies in a file of its own, and without it the text model is not its own"
_NO_MODEL = "transformers has no such model"
_DIFFUSION = "it writes by filling in masks, not from left to right"
_SPEECH = "it makes sounds of codes"

REASONS = {
    "clip": "it sees pictures for another model, and is served beside it from safetensors",
    "t5": _ENCODER_DECODER,
    "t5encoder": _ENCODER_DECODER,
    "wavtokenizer-dec": _SPEECH,
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
}
_NAMED = 4  # tensors that a refusal names, at most


def refusal(architecture: str, tensors: Iterable[str], rows: Mapping[str, GgufArchitecture]) -> str:
    """Why a file of `architecture` with these tensors is not served, as a clause; for one that nobody knows, which of
    `rows` is nearest, and what that has not."""
    import gguf  # takes a while

    if (reason := REASONS.get(architecture)) is not None:
        return reason
    if architecture in gguf.MODEL_ARCH_NAMES.values():
        return _NO_MODEL
    stems = {_stem(name) for name in tensors}
    names = {name: _stems_of(row) for name, row in rows.items()}
    nearest = max(names, key=lambda name: (_likeness(names[name], stems), name == "llama"))
    if not (stems & names[nearest]):
        return "nobody has said what its tensors are"
    strange = sorted(stems - names[nearest])
    said = ", ".join(strange[:_NAMED]) + (f" and {len(strange) - _NAMED} more" if len(strange) > _NAMED else "")
    return f"it is not known; {nearest!r} is nearest, " + (
        f"and has no {said}" if strange else "and has the same tensors"
    )


def _stem(name: str) -> str:
    """`blk.7.attn_q.weight` is an `attn_q`."""
    return re.sub(r"^(blk\.\d+|blk\.\{\w*\})\.", "", name.removesuffix(".weight").removesuffix(".bias"))


def _stems_of(row: GgufArchitecture) -> set[str]:
    import gguf

    wanted = row.names_of or row.name
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)
    return {_stem(gguf.TENSOR_NAMES[tensor]) for tensor in gguf.MODEL_TENSORS[number]} | {
        _stem(name) for name in row.names
    }


def _likeness(known: Collection[str], stems: Collection[str]) -> float:
    """What both have of what either has."""
    return len({*known} & {*stems}) / max(1, len({*known} | {*stems}))
