"""Why files of an architecture that has no row in `gguf_architectures.py` are not served. Pure."""

import re
from collections.abc import Iterable, Mapping

from services.executor.families.gguf import GgufArchitecture

_NO_MODEL = "transformers has no such model"
_ENCODER_DECODER = "its decoder reads what an encoder has made of the prompt, and such models are not served"
_DIFFUSION = "it writes by filling in masks, not from left to right"
_PICTURES = "it writes pictures, or about them, by a text model that is not served alone"

# Where transformers has a model, or could not have one.
REASONS = {
    **dict.fromkeys(("t5", "t5encoder"), _ENCODER_DECODER),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(("chameleon", "cogvlm"), _PICTURES),
    "clip": "it sees pictures for a text model, and texts alone are served",
    "wavtokenizer-dec": "it makes sounds, not texts",
    "llama-embed": "its layers see what follows, and transformers' Llama does not",
    "nomic-bert-moe": "transformers' NomicBERT has no experts",
    "step35": "its layers are none that are served",
    "gptj": "no program writes such files",
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
    nearest = max(names, key=lambda name: len(names[name] & stems))  # of several the first
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
