"""What GGUF files have done to the rows, columns or numbers of a tensor, by the names that rows of
`families/gguf_architectures.py` use, there and back.

A transform that orders rows or blocks of columns leaves codes as they are; one that changes numbers is of tensors that
hold numbers. One may do both.
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
    """What was done."""

    # Rows of a tensor, its name, settings: int64 [rows], the row of the file for each of the model's. Raises
    # `ValueError` where they do not fit.
    order: Callable[[int, str, Settings], Tensor] | None = None
    # (the file's numbers to the model's, the model's to the file's)
    numbers: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    # As `order`, of columns: (int64 [blocks], the block of the file for each of the model's; columns of a block)
    columns: Callable[[int, str, Settings], tuple[Tensor, int]] | None = None

    def write(self, rows: Tensor, name: str, settings: Settings) -> Tensor:
        """The file's rows, of all `rows` of the model's tensor that the file calls `name`."""
        if self.numbers is not None:
            rows = self.numbers[1](rows)
        if self.order is not None:
            rows = rows[self.order(len(rows), name, settings).argsort()]
        if self.columns is not None:
            blocks, width = self.columns(rows.shape[1], name, settings)
            rows = rows.view(len(rows), -1, width)[:, blocks.argsort()].flatten(1)
        return rows


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
    return interleaved(torch.arange(count), own).argsort()


def _heads_of(name: str, settings: Settings) -> int:
    queries: int = settings["num_attention_heads"]
    return queries if ".attn_q." in name else settings.get("num_key_value_heads") or queries


def _groups(count: int, name: str, settings: Settings) -> Tensor:
    """The model has the queries, the key and the value of a group of heads behind each other, then the next group's;
    files have all queries, all keys, all values."""
    queries = settings.get("num_attention_heads") or settings["n_head"]
    groups = settings.get("num_kv_heads") or queries
    width, rest = divmod(count, queries + 2 * groups)
    if rest or queries % groups:
        raise ValueError(f"has {count} rows, which are not {queries} heads of queries and {groups} of keys and values")
    heads = torch.arange(count).view(-1, width)
    parts = (heads[:queries], heads[queries : queries + groups], heads[queries + groups :])
    return torch.cat([part.reshape(groups, -1) for part in parts], dim=1).reshape(-1)


def _turned_halves(count: int, name: str, settings: Settings) -> Tensor:
    """Of each head: the model turns 2i with 2i + 1 of those values that turn, files i with i + n/2, of n."""
    heads, turned = _heads_of(name, settings), float(settings["rope_parameters"]["partial_rotary_factor"])
    turned = int(turned * count / heads)
    if count % heads or turned % 2:
        raise ValueError(f"has {count} rows, which are not {heads} heads")
    head = torch.cat([torch.arange(turned).view(2, -1).T.reshape(-1), torch.arange(turned, count // heads)])
    return (torch.arange(heads)[:, None] * len(head) + head).reshape(-1)


def _value_heads(count: int, name: str, settings: Settings) -> Tensor:
    """Of the gated delta rule: the model has those of a key head side by side, files the first of each key head, then
    the second of each."""
    keys, values = (int(settings[f"linear_num_{kind}_heads"]) for kind in ("key", "value"))
    if not keys or values % keys or not values or count % values:
        raise ValueError(f"has {count} rows or columns, which are not {values} heads of values for {keys} of keys")
    return torch.arange(count).view(values // keys, keys, -1).transpose(0, 1).reshape(-1)


def _behind_keys(count: int, name: str, settings: Settings) -> Tensor:
    """As `_value_heads`, behind the rows of queries and keys."""
    before = 2 * int(settings["linear_num_key_heads"]) * int(settings["linear_key_head_dim"])
    if count <= before:
        raise ValueError(f"has {count} rows, of which {before} are of queries and keys")
    return torch.cat([torch.arange(before), before + _value_heads(count - before, name, settings)])


def _value_columns(count: int, name: str, settings: Settings) -> tuple[Tensor, int]:
    heads = int(settings["linear_num_value_heads"])
    _value_heads(count, name, settings)
    return _value_heads(heads, name, settings), count // heads


_PLUS_ONE = (lambda values: values.float() - 1, lambda values: values.float() + 1)
_MINUS_EXP = (lambda values: (-values.float()).log(), lambda values: -values.float().exp())

TRANSFORMS = {
    "pairs": Transform(_pairs),
    "groups": Transform(_groups),
    "plus_one": Transform(numbers=_PLUS_ONE),
    "minus_exp": Transform(numbers=_MINUS_EXP),
    "value_heads": Transform(_value_heads),
    "value_heads_behind_keys": Transform(_behind_keys),
    "value_heads_minus_exp": Transform(_value_heads, _MINUS_EXP),
    "value_columns": Transform(columns=_value_columns),
    "turned_halves": Transform(_turned_halves),
}
