"""Parameters of which files have the parts in several tensors, mixed otherwise than one below the other, by the names
that rows of `families/gguf_architectures.py` have for them. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.executor.core.sharding import ShardRange
from services.executor.model.loading.composition import Composition, TensorBox, concatenated
from shared.errors import ModelLoadError

Shapes = Mapping[str, tuple[int, ...]]  # of the file's tensors, rows first
# (how the names of a layer's tensors begin, shapes, config.json): the parameter. Raises `ModelLoadError`.
Compose = Callable[[str, Shapes, Mapping[str, Any]], Composition]


def _queries_keys_values_gates(block: str, shapes: Shapes, settings: Mapping[str, Any]) -> Composition:
    """Of the gated delta rule, of Qwen 3 Next: the model has [q | k | its values | their gates] of a key head, then the
    next one's; files [all q | all k | all values] and the gates."""
    keys, key_dim = int(settings["linear_num_key_heads"]), int(settings["linear_key_head_dim"])
    value_dim = int(settings["linear_num_value_heads"]) * int(settings["linear_value_head_dim"]) // keys
    mixed, gates = (
        Composition.whole(name, _checked(name, shapes, (keys * rows, None)))
        for name, rows in (
            (f"{block}.attn_qkv.weight", 2 * key_dim + value_dim),
            (f"{block}.attn_gate.weight", value_dim),
        )
    )
    pieces = []
    for head in range(keys):
        spans = [_span(0, head, key_dim), _span(keys * key_dim, head, key_dim)]
        spans.append(_span(2 * keys * key_dim, head, value_dim))
        pieces += [mixed.selected(0, spans), gates.selected(0, [_span(0, head, value_dim)])]
    return _below(pieces, block)


def _keys_values(block: str, shapes: Shapes, settings: Mapping[str, Any]) -> Composition:
    """Of latent attention: the model has [keys | values] of a head, then the next one's, by the latent's columns; files
    the keys, transposed, and the values, each by heads."""
    heads, latent = int(settings["num_attention_heads"]), int(settings["kv_lora_rank"])
    key_dim, value_dim = int(settings["qk_nope_head_dim"]), int(settings["v_head_dim"])
    keys, values = f"{block}.attn_k_b.weight", f"{block}.attn_v_b.weight"
    _checked(keys, shapes, (heads, latent, key_dim))
    _checked(values, shapes, (heads, value_dim, latent))
    parts, width = [], key_dim + value_dim
    for head in range(heads):
        at = head * width
        parts.append(TensorBox(keys, (1, 0), (0, head * latent), (at, 0), (key_dim, latent)))
        parts.append(TensorBox(values, (0, 1), (head * value_dim, 0), (at + key_dim, 0), (value_dim, latent)))
    return Composition((heads * width, latent), tuple(parts))


def _span(before: int, index: int, width: int) -> ShardRange:
    return ShardRange(before + index * width, before + (index + 1) * width)


def _checked(name: str, shapes: Shapes, expected: tuple[int | None, ...]) -> tuple[int, ...]:
    """The shape of the tensor; None in what is `expected` stands for any size."""
    shape = shapes.get(name)
    if shape is None:
        raise ModelLoadError(f"The file has no tensor {name}, which its architecture calls for; fetch it again.")
    if len(shape) != len(expected) or any(size not in (None, own) for own, size in zip(shape, expected, strict=True)):
        sizes = ["any" if size is None else size for size in expected]
        raise ModelLoadError(
            f"The tensor {name} has the shape {list(shape)} where {sizes} is called for; fetch the file again."
        )
    return shape


def _below(pieces: Sequence[Composition], block: str) -> Composition:
    try:
        return concatenated(pieces, 0)
    except ValueError as error:
        raise ModelLoadError(f"The file's tensors of {block} do not fit ({error}); fetch it again.") from error


COMPOSED: dict[str, Compose] = {"keys_values": _keys_values, "queries_keys_values_gates": _queries_keys_values_gates}
