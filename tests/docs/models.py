"""docs/models.md: the architectures that are served, and those that are not. Pure."""

from services.executor.model.catalogue import REFUSED, SERVED, refusal_of

PROVEN_RANKS = (1, 2, 3)
PROVEN_ERROR = 1e-4
"""Largest absolute difference of any logit from transformers', float32."""

_BY_CONFIGURATION: tuple[tuple[str, str], ...] = (
    ("encoder-decoders, and decoders with cross-attention", "there is no encoder"),
    ("models that take more than text", "only the text is served"),
    (
        "weights quantized otherwise than docs/quantization.md lists",
        "what their codes stand for is not known here",
    ),
    ("attention that looks ahead (`use_bidirectional_attention`)", "a token is computed once, when it comes"),
    ("layer types other than full and sliding attention", "the KV cache holds keys and values only"),
    (
        "contexts beyond the length of first training with LongRoPE (Phi-3 128k, Phi-4-mini: 4096 tokens)",
        "its frequencies would then follow the longest sequence of the batch, and a text depend on its neighbours",
    ),
    ("more ranks than attention heads", "a rank needs a head; use a smaller `--tp`"),
)


def page() -> str:
    ranks = ", ".join(str(ranks) for ranks in PROVEN_RANKS)
    lines = [
        "# Models",
        "",
        "<!-- Made by `python -m tests.docs`; a test fails when it is stale. -->",
        "",
        f"{len(SERVED)} architectures are served, over any number of ranks up to the number of attention heads.",
        "Each is proven by `tests/unit/executor/model/test_architectures.py`: a small model with random weights,",
        "built in the test, runs a prefill in chunks and 16 decode steps over the paged cache, beside other",
        "sequences, and the logits of every token are compared with transformers' own forward of the whole text, in",
        "fp32. Heads, widths and vocabulary do not divide by the ranks. A run in bf16 shows that the type people",
        "serve in works as well.",
        "",
        "| architecture | `model_type` | for example | shown | ranks | largest error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.title} | `{name}` | {row.examples} | {row.shown} | {ranks} | < {PROVEN_ERROR} |"
        for name, row in sorted(SERVED.items(), key=lambda item: item[1].title.lower())
    ]
    lines += [
        "",
        "How each is split stands in `services/executor/model/parallel/plans.py`; what a plan does not name is "
        "replicated.",
        "",
        "## Refused",
        "",
        "Refused at load, with the reason, before a byte of the weights is read:",
        "",
        "| architectures | why: the architecture ... |",
        "| --- | --- |",
    ]
    lines += [f"| {', '.join(f'`{name}`' for name in row.model_types)} | {row.because} |" for row in REFUSED]
    lines += [f"| all others | {refusal_of('')} |", "", "And of the architectures that are served:", ""]
    lines += ["| what | why |", "| --- | --- |"]
    lines += [f"| {what} | {why} |" for what, why in _BY_CONFIGURATION]
    return "\n".join(lines) + "\n"
