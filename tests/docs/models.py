"""The tables of docs/models.md: the architectures that are served, and those that are not."""

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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
