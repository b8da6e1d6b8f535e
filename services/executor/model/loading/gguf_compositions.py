"""Parameters that are part of a file's tensor, or of which files have the parts in several, mixed otherwise than one
below the other, by the names that rows of `families/gguf_architectures.py` have for them. Pure.
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
    return fitted(pieces, 0, f"tensors of {block}")


def _keys_values_of_latents(block: str, shapes: Shapes, settings: Mapping[str, Any]) -> Composition:
    """Of latent attention: the model makes [keys without position | values] of a head, then the next one's; files have
    the values' matrices, and those of the keys transposed."""
    heads = int(settings["num_attention_heads"])
    width, latent = int(settings["qk_nope_head_dim"]), int(settings["kv_lora_rank"])
    keys, values = f"{block}.attn_k_b.weight", f"{block}.attn_v_b.weight"
    _checked(keys, shapes, (heads, latent, width))
    _checked(values, shapes, (heads, int(settings["v_head_dim"]), latent))
    pieces = []
    for head in range(heads):
        pieces += [matrix_of(keys, head, shapes).transposed(0, 1), matrix_of(values, head, shapes)]
    return fitted(pieces, 0, f"tensors of {block}")


def _part_of_all(part: int, end: str) -> Compose:
    """Queries, keys or values, their weights or biases, of files that have [all q | all k | all v]."""

    def compose(block: str, shapes: Shapes, settings: Mapping[str, Any]) -> Composition:
        width = int(settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"])
        queries, keys = (width * int(settings[f"num_{of}_heads"]) for of in ("attention", "key_value"))
        name, rows = f"{block}.attn_qkv.{end}", queries + 2 * keys
        whole = Composition.whole(name, _checked(name, shapes, (rows, None) if end == "weight" else (rows,)))
        return whole.split([queries, keys, keys], 0)[part]

    return compose


def _experts_below(side: str, turned: bool = False) -> Compose:
    """One side of all experts as one matrix, an expert below the other; `turned`: where files have it transposed."""

    def compose(block: str, shapes: Shapes, settings: Mapping[str, Any]) -> Composition:
        name, experts = f"{block}.ffn_{side}_exps.weight", int(settings["ffn_config"]["moe_num_experts"])
        _checked(name, shapes, (experts, None, None))
        matrices = (matrix_of(name, expert, shapes) for expert in range(experts))
        return fitted([matrix.transposed(0, 1) if turned else matrix for matrix in matrices], 0, f"tensors of {block}")

    return compose


def matrix_of(name: str, number: int, shapes: Shapes) -> Composition:
    """A matrix of the tensor `name` of three dimensions, whose rows the file has one after the other. Raises
    `ModelLoadError`."""
    shape = shapes.get(name, ())
    if len(shape) != 3 or number >= shape[0]:
        raise lacks(f"{name} of three dimensions with a matrix {number}")
    rows, columns = shape[1:]
    return Composition((rows, columns), (TensorBox(name, (0, 1), (number * rows, 0), (0, 0), (rows, columns)),))


def _span(before: int, index: int, width: int) -> ShardRange:
    return ShardRange(before + index * width, before + (index + 1) * width)


def _checked(name: str, shapes: Shapes, expected: tuple[int | None, ...]) -> tuple[int, ...]:
    """The shape of the tensor; None in what is `expected` stands for any size."""
    shape = shapes.get(name)
    if shape is None:
        raise lacks(name)
    if len(shape) != len(expected) or any(size not in (None, own) for own, size in zip(shape, expected, strict=True)):
        raise misshapen(name, shape, ["any" if size is None else size for size in expected])
    return shape


def fitted(pieces: Sequence[Composition], dim: int, what: str) -> Composition:
    """`pieces` end to end along `dim`; `what` of the file they are. Raises `ModelLoadError` where they do not fit."""
    try:
        return concatenated(pieces, dim)
    except ValueError as error:
        raise ModelLoadError(f"The file's {what} do not fit ({error}); fetch it again.") from error


def lacks(what: str) -> ModelLoadError:
    """A file that has no such tensor."""
    return ModelLoadError(f"The file has no tensor {what}, which its architecture calls for; fetch it again.")


def misshapen(name: str, shape: Sequence[int], expected: Sequence[object]) -> ModelLoadError:
    """A file whose tensor `name` has another shape than `expected`."""
    return ModelLoadError(
        f"The tensor {name} has the shape {list(shape)} where {list(expected)} is called for; fetch the file again."
    )


COMPOSED: dict[str, Compose] = {
    "queries_keys_values_gates": _queries_keys_values_gates,
    "keys_values_of_latents": _keys_values_of_latents,
    **{
        f"{of}_of_all.{end}": _part_of_all(part, end)
        for part, of in enumerate(("queries", "keys", "values"))
        for end in ("weight", "bias")
    },
    "gates_below": _experts_below("gate"),
    "ups_below": _experts_below("up"),
    "downs_below": _experts_below("down", turned=True),
}
