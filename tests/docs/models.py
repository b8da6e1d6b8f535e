"""The tables of docs/models.md: the architectures that are served, and those that are not."""

from collections import defaultdict

import gguf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.executor.families.gguf_architectures import GGUF
from services.executor.families.gguf_refusals import refusal
from services.executor.families.registry import DECODERS, ENCODERS
from services.executor.model.catalogue import REFUSED, TEXT_ALONE, refusal_of

PROVEN_RANKS = (1, 2, 3)
PROVEN_ERROR = 1e-4  # largest absolute difference of any logit from transformers', float32


def served() -> str:
    """Decoders, by name."""
    causal = len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    lines = [
        f"{sum(not row.listed_elsewhere for row in DECODERS.values())} of transformers' {causal} causal types:",
        "",
        "| architecture | `model_type` | for example | shown |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.title} | `{name}` | {row.examples} | {row.shown} |"
        for name, row in sorted(DECODERS.items(), key=lambda item: item[1].title.lower())
    ]
    types = ", ".join(f"`{name}`" for name in sorted(TEXT_ALONE))
    lines += ["", f"Types of models that take images or sound too, served as their text model: {types}."]
    return "\n".join(lines)


def encoders() -> str:
    lines = ["| architecture | `model_type` | for example | shown | ranks |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| {row.title} | `{name}` | {row.examples} | {row.shown} | {'1' if row.one_rank else '1, 2'} |"
        for name, row in ENCODERS.items()
    ]
    lines.append("| Gemma 3 (text) | `gemma3_text` | EmbeddingGemma | looks ahead; windows to both sides | 1, 2 |")
    return "\n".join(lines)


def refused() -> str:
    """By architecture, with the reason."""
    lines = ["| architectures | why: the architecture ... |", "| --- | --- |"]
    lines += [f"| {', '.join(f'`{name}`' for name in row.model_types)} | {row.because} |" for row in REFUSED]
    lines.append(f"| all others | {refusal_of('')} |")
    return "\n".join(lines)


def gguf_architectures() -> str:
    """Those of GGUF files, by the model that transformers computes, and those that are refused, by the reason."""
    known = set(gguf.MODEL_ARCH_NAMES.values())
    packed, others = known & GGUF.keys(), sorted(known - GGUF.keys())
    served, reasons = defaultdict(set), defaultdict(list)
    for row in GGUF.values():
        for each in (row, *row.variants.values()):
            served[each.config_type()].add(row.name)
    for name in others:
        reasons[refusal(name, [], GGUF)].append(name)
    lines = [
        f"Of gguf-py's {len(known)} architectures {len(packed)} are served as they are packed, none is unpacked, "
        f"{len(others)} are refused by name; {len(GGUF.keys() - known)} are served that gguf-py does not list.",
        "",
        "| `model_type` | files of the architecture |",
        "| --- | --- |",
    ]
    lines += [f"| `{kind}` | {_names(sorted(names))} |" for kind, names in sorted(served.items())]
    lines += ["", "| refused | why |", "| --- | --- |"]
    lines += [f"| {_names(names)} | {reason} |" for reason, names in sorted(reasons.items())]
    return "\n".join(lines)


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
