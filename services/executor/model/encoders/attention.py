"""Attention over a flat batch of whole texts, reached from transformers' encoders by name.

    rows   [ a0 a1 a2 | b0 | c0 c1 ]      a row attends to the rows of its own text alone, before and behind it

There is no cache: a text is computed in one step. Each text is attended to by itself, so that its states do not depend
on what else the step computes but for the rounding of products over all rows.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from shared.errors import ModelLoadError

ATTENTION_NAME = "ryzanstein_texts"  # no mask function goes by this name, so transformers builds no mask

_HARMLESS = frozenset({"position_ids", "deterministic", "use_cache", "is_causal"})
_ROWS = 1024  # that attend at once: a long text shows progress between


class Texts:
    """Where the texts of a step lie in its flat batch. Reaches attention as the keyword argument `texts`."""

    def __init__(self, lengths: Sequence[int], tick: Callable[[], None]) -> None:
        """`lengths`: tokens of each; `tick` is called as a sign of progress."""
        self.tick = tick
        self.spans = list(pairwise(accumulate(lengths, initial=0)))


def register_text_attention() -> None:
    """Makes the attention known to transformers. Call it before a model is built; twice does no harm."""
    AttentionInterface.register(ATTENTION_NAME, text_attention)


def text_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    texts: Texts,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """`query` [1, heads, T, d], `key` and `value` [1, heads or KV heads, T, d], all local to this rank. Rows that are
    `sliding_window` apart or more do not see each other. Returns ([1, T, heads, d], None).

    Raises `ModelLoadError` when the model asks for what is not supported.
    """
    asked = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if attention_mask is not None or asked:
        raise ModelLoadError(
            f"The model's attention asks for {', '.join(asked) or 'a mask'}, which is not served in encoders; choose "
            "another model."
        )
    out = torch.empty_like(query)
    grouped = key.shape[1] != query.shape[1]
    for first, end in texts.spans:
        for begin in range(first, end, _ROWS):
            stop = min(end, begin + _ROWS)
            out[:, :, begin:stop] = scaled_dot_product_attention(
                query[:, :, begin:stop],
                key[:, :, first:end],
                value[:, :, first:end],
                attn_mask=_near(begin - first, stop - first, end - first, sliding_window, query.device),
                scale=scaling,
                enable_gqa=grouped,
            )
            texts.tick()
    return out.transpose(1, 2), None


def _near(begin: int, stop: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
    """bool [stop - begin, length]: which tokens of a text its rows [begin, stop) see; None: all."""
    if window is None or length <= window:
        return None
    at = torch.arange(length, device=device)
    return (at[begin:stop, None] - at).abs() < window
