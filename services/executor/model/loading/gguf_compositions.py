"""Parameters of which files have the parts in several tensors, mixed otherwise than one below the other, by the names
that rows of `families/gguf_architectures.py` have for them. Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.executor.core.sharding import ShardRange
from services.executor.model.loading.composition import Composition, concatenated
from shared.errors import ModelLoadError

Shapes = Mapping[str, tuple[int, ...]]  # of the file's tensors, rows first
# (how the names of a layer's tensors begin, shapes, config.json): the parameter. Raises `ModelLoadError`.
Compose = Callable[[str, Shapes, Mapping[str, Any]], Composition]


def _queries_keys_values_gates(block: str, shapes: Shapes, settings: Mapping[str, Any]) -> Composition:
    """Of the gated delta rule, of Qwen 3 Next: the model has [q | k | its values | their gates] of a key head, then the
    next one's; files [all q | all k | all values] and the gates."""
    keys, key_dim = int(settings["linear_num_key_heads"]), int(settings["linear_key_head_dim"])
    value_dim = int(settings["linear_num_value_heads"]) * int(settings["linear_value_head_dim"]) // keys
    mixed = _whole(f"{block}.attn_qkv.weight", shapes, keys * (2 * key_dim + value_dim))
    gates = _whole(f"{block}.attn_gate.weight", shapes, keys * value_dim)
    pieces = []
    for head in range(keys):
        spans = [_span(0, head, key_dim), _span(keys * key_dim, head, key_dim)]
        spans.append(_span(2 * keys * key_dim, head, value_dim))
        pieces += [mixed.selected(0, spans), gates.selected(0, [_span(0, head, value_dim)])]
    return _below(pieces, block)


def _span(before: int, index: int, width: int) -> ShardRange:
    return ShardRange(before + index * width, before + (index + 1) * width)


def _whole(name: str, shapes: Shapes, rows: int) -> Composition:
    if name not in shapes:
        raise ModelLoadError(f"The file has no tensor {name}, which its architecture calls for; fetch it again.")
    if len(shapes[name]) != 2 or shapes[name][0] != rows:
        raise ModelLoadError(
            f"The tensor {name} has the shape {list(shapes[name])}, and {rows} rows are called for; fetch the file "
            "again."
        )
    return Composition.whole(name, shapes[name])


def _below(pieces: Sequence[Composition], block: str) -> Composition:
    try:
        return concatenated(pieces, 0)
    except ValueError as error:
        raise ModelLoadError(f"The file's tensors of {block} do not fit ({error}); fetch it again.") from error


COMPOSED: dict[str, Compose] = {"queries_keys_values_gates": _queries_keys_values_gates}
