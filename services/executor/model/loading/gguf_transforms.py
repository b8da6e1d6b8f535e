"""What GGUF files have done to the rows or numbers of a tensor, by the names that rows of
`families/gguf_architectures.py` use, there and back.

A transform that orders rows leaves codes as they are; one that changes numbers is of tensors that hold numbers. One may
do both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from services.executor.families.gguf import GgufArchitecture

Settings = Mapping[str, Any]  # config.json


@dataclass(frozen=True)
class Transform:
    """What was done, and how it is written."""

    # Rows of the model's tensor, the file's name of it, settings: the file's rows
    write: Callable[[Tensor, str, Settings], Tensor]
    # Rows of a tensor, its name, settings: int64 [rows], the row of the file for each of the model's. Raises
    # `ValueError` where they do not fit.
    order: Callable[[int, str, Settings], Tensor] | None = None
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


def _pairs(count: int, name: str, settings: Settings) -> Tensor:
    own = _heads_of(name, settings)
    if count % (2 * own):
        raise ValueError(f"has {count} rows, which are not {own} heads")
    return torch.arange(count).view(own, -1, 2).transpose(1, 2).reshape(-1)


def _heads_of(name: str, settings: Settings) -> int:
    queries: int = settings["num_attention_heads"]
    return queries if ".attn_q." in name else settings.get("num_key_value_heads") or queries


TRANSFORMS = {
    "pairs": Transform(write=lambda rows, name, settings: interleaved(rows, _heads_of(name, settings)), order=_pairs),
    "plus_one": Transform(write=lambda rows, *_: rows.float() + 1, numbers=lambda values: values.float() - 1),
    "minus_exp": Transform(write=lambda rows, *_: -rows.float().exp(), numbers=lambda values: (-values.float()).log()),
}
