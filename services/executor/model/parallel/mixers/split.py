"""How a module that keeps recurrent state is made a rank's share: what of which of its parts, as data.

Each kind of state says what a rank holds (`StateKind.splits`); this makes it so, part by part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout, ShardRange
from services.executor.model.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorSlice,
    hold,
    leave_out,
)

Spans = tuple[ShardRange, ...]


@dataclass(frozen=True)
class MixerSplit:
    """What one rank holds of a module. By the names of its parts."""

    # Linear layers of which it holds these outputs.
    outputs: Mapping[str, Spans] = field(default_factory=dict)
    # Convolutions, each channel or group of channels for itself.
    channels: Mapping[str, Spans] = field(default_factory=dict)
    # Parameters, along their first dimension of more than one value unless a slice names another.
    values: Mapping[str, Spans | TensorSlice] = field(default_factory=dict)
    # Linear layers of which it holds these inputs; what it is given begins so many values before them.
    inputs: Mapping[str, tuple[ShardRange | Spans, int]] = field(default_factory=dict)
    # Parts in whose place stands another, which is made of them.
    replaced: Mapping[str, Callable[[Any, Collectives], nn.Module]] = field(default_factory=dict)
    attributes: Mapping[str, int] = field(default_factory=dict)  # sizes that the module's code reads
    let_go: tuple[str, ...] = ()  # buffers of the checkpoint that nothing reads
    # What else is done to the module, before it is split.
    adapt: Callable[[Any, Collectives], None] = lambda module, collectives: None


def split_mixer(module: nn.Module, split: MixerSplit, collectives: Collectives) -> None:
    """Makes `module` this rank's share, in place. What the split does not name stays whole."""
    part: Callable[[str], Any] = module.get_submodule
    split.adapt(module, collectives)
    for name in split.let_go:
        delattr(module, name)
        leave_out(module, name)
    for name, replacement in split.replaced.items():
        module.set_submodule(name, replacement(part(name), collectives))
    for name, spans in split.outputs.items():
        module.set_submodule(name, ColumnParallelLinear(part(name), *spans))
    for name, (span, skip) in split.inputs.items():
        module.set_submodule(name, RowParallelLinear(part(name), span, collectives, skip))
    for name, spans in split.channels.items():
        _hold_channels(part(name), spans)
    for name, held in split.values.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        parameter = getattr(owner, leaf)
        dim = next((dim for dim, size in enumerate(parameter.shape) if size > 1), 0)
        piece = held if isinstance(held, TensorSlice) else TensorSlice(dim, held, parameter.shape[dim])
        hold(owner, leaf, parameter, piece)
    for name, value in split.attributes.items():
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, value)


def _hold_channels(convolution: nn.Conv1d, spans: Spans) -> None:
    piece = TensorSlice(0, spans, convolution.out_channels)
    hold(convolution, "weight", convolution.weight, piece)
    if convolution.bias is not None:
        hold(convolution, "bias", convolution.bias, piece)
    convolution.groups = convolution.groups * piece.size // piece.full
    convolution.in_channels = convolution.out_channels = piece.size


def output_span(heads: ShardLayout, size: int) -> tuple[ShardRange, int]:
    """The inputs of an output projection, `size` for each head, that a rank multiplies; and how many values its own
    output has before them."""
    span = heads.output_heads.scaled(size)
    return span, span.start - heads.q_heads.scaled(size).start
