"""What the kernels for CPUs ask of a model beyond its shape (`model/lowering.py`), and how they pack its linears."""

from typing import Any

import torch

from services.executor.model import lowering
from services.executor.model.lowering import Activation, CannotLower, Lowered
from services.executor.model.sharding import split_dimension
from services.executor.native.packed import GATE_RUN, Piece, alternating, one_after_another

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
"""As `decoder.h` numbers them."""
_MOST_GROUP = 48
"""Query heads of a KV head that a tile of attention has room for (`attention.h`)."""
_HEAD_DIMS = frozenset(range(32, 257, 32))


def lower(model: Any, dtype: torch.dtype, world_size: int) -> Lowered:
    """Describes one rank's share of `model`, loaded and not yet packed.

    Raises `CannotLower` with the reason, on all `world_size` ranks or on none.
    """
    lowered = lowering.lower(model, dtype)
    if dtype is not torch.bfloat16:
        raise CannotLower("only bf16 is computed by the native kernels")
    config = model.config
    _check_widths(config, world_size)
    if config.num_attention_heads > _MOST_GROUP * config.num_key_value_heads:
        raise CannotLower(f"more than {_MOST_GROUP} query heads share a KV head")
    attention: Any = lowered.layers[0].attention
    if attention.head_dim not in _HEAD_DIMS:
        raise CannotLower(f"heads of {attention.head_dim} values do not fit the native kernels")
    return lowered


def qkv_pieces(attention: Any, q_rows: int, kv_rows: int) -> list[Piece]:
    """Queries, keys and values of a layer; `q_rows` and `kv_rows` are this rank's."""
    if hasattr(attention, "qkv_proj"):
        weight, bias = _weights(attention.qkv_proj)
        sizes = [q_rows, kv_rows, kv_rows]
        biases = [None] * 3 if bias is None else torch.split(bias, sizes)
        return one_after_another(zip(torch.split(weight, sizes), biases, strict=True))
    return one_after_another(_weights(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))


def gate_up_pieces(feed_forward: Any) -> list[Piece]:
    """Gate and up projections of a layer, alternating."""
    if hasattr(feed_forward, "gate_up_proj"):
        gate, up = feed_forward.gate_up_proj.weight.chunk(2)
        return alternating((gate, None), (up, None))
    return alternating(_weights(feed_forward.gate_proj), _weights(feed_forward.up_proj))


def _check_widths(config: Any, world_size: int) -> None:
    inner = split_dimension(config.intermediate_size, world_size)
    if config.hidden_size % 2 or any(span.size % GATE_RUN for span in inner):
        raise CannotLower(
            f"a hidden size of {config.hidden_size} with an inner width of {config.intermediate_size} does not "
            "fit the native kernels"
        )


def _weights(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return linear.weight, linear.bias
