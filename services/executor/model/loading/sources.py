"""Which checkpoint tensors each parameter of a model is made of.

A checkpoint may call tensors by other names than the model does, and hold one tensor per expert where the
model holds them all in one. What belongs together is transformers' own table, read as data:
`transformers.conversion_mapping`. Its operations are not run, because they need whole tensors; they are
followed on boxes (`composition.py`), so that slices can be read. What moves single rows (interleaving) has
no boxes and is refused.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from services.executor.model.loading.composition import Composition, concatenated, stacked
from services.executor.model.loading.text_models import text_names, whole_of
from shared.errors import ModelLoadError

# Pattern of the mapping -> the tensors it stands for, in the order of their indices.
_Collected = dict[str, list[Composition]]


@dataclass(frozen=True)
class CheckpointSources:
    """What a checkpoint gives to a model."""

    # For each name of the model's state that the checkpoint has, how it is composed.
    parameters: Mapping[str, Composition]
    unused: frozenset[str]  # tensors of the checkpoint that belong to none
    # Parameters of experts that it holds with outputs before inputs, however the model does: whether all gate values
    # come before all up values
    outputs_first: Mapping[str, bool] = field(default_factory=dict)


@dataclass
class _Group:
    """The checkpoint tensors that one converter makes parameters of."""

    converter: Any
    names: dict[str, list[str]] = field(default_factory=dict)  # pattern -> checkpoint names


def find_sources(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> CheckpointSources:
    """How the state of `model` is composed of a checkpoint's tensors of `shapes`.

    `model` is a transformers model as transformers builds it: nothing replaced yet. Raises `ModelLoadError`
    where tensors of a group are missing or do not fit, or where the mapping does more than move boxes.
    """
    # The table of a whole model says what its checkpoints call parts of the text model within it.
    of_whole = get_checkpoint_conversion_mapping(whole_of(model.config) or "")
    transforms = [*(of_whole or ()), *get_model_conversion_mapping(model)]
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    prefix = model.base_model_prefix
    parameters: dict[str, Composition] = {}
    groups: dict[str, _Group] = {}
    unused = set()
    own_names = text_names(model.config, shapes)
    for name in sorted(own_names, key=dot_natural_key):
        own = own_names[name]
        target, pattern = rename_source_key(own, renamings, converters, prefix, state)
        if target not in state and own in state:
            target, pattern = own, None
        if target not in state:
            unused.add(name)
        elif pattern is None:
            _add(parameters, target, Composition.whole(name, shapes[name]))
        else:
            group = groups.setdefault(target, _Group(by_pattern[pattern]))
            group.names.setdefault(pattern, []).append(name)
    for target, group in groups.items():
        made = _composed(group, shapes, _Scope(target, group.converter, model.config, state))
        for part, content in made.items():
            _add(parameters, part, content)
    return CheckpointSources(parameters, frozenset(unused))


def _add(parameters: dict[str, Composition], name: str, content: Composition) -> None:
    """Raises `ModelLoadError` where `parameters` has one of that name."""
    if name in parameters:
        first, second = (found.parts[0].source for found in (parameters[name], content))
        raise ModelLoadError(
            f"The tensors {first} and {second} of the weights are both {name}, and which one is meant cannot be told; "
            "fetch the model again."
        )
    parameters[name] = content


@dataclass(frozen=True)
class _Scope:
    """What an operation may ask about."""

    target: str  # the first parameter that the converter makes
    converter: Any
    config: Any
    state: Mapping[str, tuple[int, ...]]  # the shape of everything in the model's state


def _composed(group: _Group, shapes: Mapping[str, tuple[int, ...]], scope: _Scope) -> dict[str, Composition]:
    """The parameters that `group` makes."""
    collected: _Collected = {
        pattern: [Composition.whole(name, shapes[name]) for name in names] for pattern, names in group.names.items()
    }
    _check_complete(group, scope)
    for operation in group.converter.operations:
        follow = _OPERATIONS.get(type(operation).__name__)
        example = next(iter(group.names.values()))[0]
        if follow is None:
            raise ModelLoadError(
                f"The checkpoint holds {example} in an order that is not read ({type(operation).__name__}); "
                "load the model with transformers, save it under its own names, or choose another model."
            )
        try:
            collected = follow(operation, collected, scope)
        except (ValueError, IndexError) as error:
            raise ModelLoadError(
                f"The tensors {example} and its like do not make up {scope.target} ({error}); "
                "the directory mixes two models, fetch the model again."
            ) from error
    return {_full_name(scope, pattern): tensors[0] for pattern, tensors in collected.items()}


def _full_name(scope: _Scope, pattern: str) -> str:
    """The parameter that `pattern`, one of the converter's targets, means beside the first."""
    first = next((known for known in scope.converter.target_patterns if known in scope.target), None)
    return scope.target if first is None else scope.target.replace(first, pattern, 1)


def _check_complete(group: _Group, scope: _Scope) -> None:
    """Raises where an indexed tensor (an expert) or one of several kinds (gate, up) is not there."""
    patterns = group.converter.source_patterns
    indexed = [names for pattern, names in group.names.items() if "*" in pattern]
    if not indexed:
        missing = [pattern for pattern in patterns if pattern not in group.names]
        if missing:
            raise _missing(f"{missing[0].strip('.')} for {scope.target}")
        return
    merged = [entry for entry in group.converter.operations if type(entry).__name__ == "MergeModulelist"]
    count = scope.state[scope.target][merged[0].dim] if merged else max(map(len, indexed))
    for pattern in patterns:
        names = group.names.get(pattern, [])
        if not names:
            raise _missing(f"{pattern.strip('.').replace('*', '0')} for {scope.target}")
        lacking = _first_lacking(names, pattern, count)
        if lacking is not None:
            raise _missing(lacking)


def _first_lacking(names: list[str], pattern: str, count: int) -> str | None:
    """The first of `count` tensors, numbered where `pattern` has its star, that is not among `names`."""
    behind = pattern.rpartition("*")[2]
    # The index is the last number before what follows the star.
    cut = re.compile(rf"^(.*\.)(\d+)({behind if behind.startswith('.') else '.*'})$")
    found = {}
    for name in names:
        match = cut.match(name)
        if match is None:
            return None
        found[int(match.group(2))] = match
    lacking = next((index for index in range(count) if index not in found), None)
    if lacking is None:
        return None
    first = next(iter(found.values()))
    return f"{first.group(1)}{lacking}{first.group(3)}"


def _missing(what: str) -> ModelLoadError:
    return ModelLoadError(
        f"The weights have no tensor {what}, which config.json calls for; "
        "the directory mixes two models or is incomplete, fetch the model again."
    )


def _single(collected: _Collected) -> Composition:
    if len(collected) != 1:
        raise ValueError("several kinds of tensors where one is needed")
    return next(iter(collected.values()))[0]


def _merge(operation: Any, collected: _Collected, scope: _Scope) -> _Collected:
    names = scope.converter.target_patterns
    return {
        operation.get_target_pattern(len(collected), pattern, names): [stacked(tensors, operation.dim)]
        for pattern, tensors in collected.items()
    }


def _concatenate(operation: Any, collected: _Collected, scope: _Scope) -> _Collected:
    order = [pattern for pattern in scope.converter.source_patterns if pattern in collected]
    pieces = [tensor for pattern in order for tensor in collected[pattern]]
    return {operation.get_target_pattern(scope.converter.target_patterns): [concatenated(pieces, operation.dim)]}


def _chunk(operation: Any, collected: _Collected, scope: _Scope) -> _Collected:
    names = operation.get_target_patterns(scope.converter.target_patterns, config=scope.config)
    whole = _single(collected)
    size, rest = divmod(whole.shape[operation.dim], len(names))
    if rest:
        raise ValueError(f"{whole.shape[operation.dim]} rows for {len(names)} parameters")
    pieces = whole.split([size] * len(names), operation.dim)
    return {name: [piece] for name, piece in zip(names, pieces, strict=True)}


def _split(operation: Any, collected: _Collected, scope: _Scope) -> _Collected:
    names = scope.converter.target_patterns
    sizes = [scope.state[_full_name(scope, name)][operation.dim] for name in names]
    whole = _single(collected)
    if whole.shape[operation.dim] != sum(sizes):
        raise ValueError(f"{whole.shape[operation.dim]} rows for {sum(sizes)}")
    pieces = whole.split(sizes, operation.dim)
    return {name: [piece] for name, piece in zip(names, pieces, strict=True)}


def _transpose(operation: Any, collected: _Collected, scope: _Scope) -> _Collected:
    converter = scope.converter
    whole = _single(collected)
    name = operation.get_target_pattern(collected, converter.source_patterns, converter.target_patterns)
    if operation.check_dims and whole.shape == scope.state[scope.target]:
        return {name: [whole]}
    return {name: [whole.transposed(operation.dim0, operation.dim1)]}


_OPERATIONS: Mapping[str, Callable[[Any, _Collected, _Scope], _Collected]] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
}
