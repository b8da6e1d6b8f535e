"""What GGUF files have done to the rows or numbers of a tensor, by the names that rows of
`families/gguf_architectures.py` use, there and back.

A transform that orders rows leaves codes as they are; one that changes numbers is of tensors that hold numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from services.executor.families.gguf import GgufArchitecture

Heads = Mapping[str, int]  # `num_attention_heads` and `num_key_value_heads`


@dataclass(frozen=True)
class Transform:
    """One of the two kinds, and how it is written."""

    # Rows of the model's tensor, the file's name of it, heads: the file's rows
    write: Callable[[Tensor, str, Heads], Tensor]
    # Rows of a tensor, its name, heads: int64 [rows], the row of the file for each of the model's. Raises `ValueError`
    # where they do not fit.
    order: Callable[[int, str, Heads], Tensor] | None = None
    numbers: Callable[[Tensor], Tensor] | None = None  # the file's numbers to the model's


def transform_of(architecture: GgufArchitecture, name: str) -> Transform | None:
    """Of the file's tensor `name`."""
    found = (key for pattern, key in architecture.transforms.items() if fnmatchcase(name, pattern))
    key = next(found, None)
    return None if key is None else TRANSFORMS[key]


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection in the order of GGUF's llama.

    Transformers rotates channel i with channel i + d/2 of a head, GGUF's llama channel 2i with 2i + 1, as the original
    Llama did. [heads * d, ...] to the same shape.
    """
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _pairs(count: int, name: str, heads: Heads) -> Tensor:
    own = _heads_of(name, heads)
    if count % (2 * own):
        raise ValueError(f"has {count} rows, which are not {own} heads")
    return torch.arange(count).view(own, -1, 2).transpose(1, 2).reshape(-1)


def _heads_of(name: str, heads: Heads) -> int:
    return heads["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]


TRANSFORMS = {
    "pairs": Transform(write=lambda rows, name, heads: interleaved(rows, _heads_of(name, heads)), order=_pairs),
    "plus_one": Transform(write=lambda rows, name, heads: rows.float() + 1, numbers=lambda values: values.float() - 1),
}
