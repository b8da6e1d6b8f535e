"""Recurrent layers, lowered: what `native/recurrent.h` computes with, whatever a model's own modules call it.

One function for each module whose forward pass is one of the kinds there (`StateKind.lowered`); all else is read from
the module, which is one rank's share (`parallel/mixers/`).
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor, nn

from services.executor.model.parallel.layers import LinearShard, RowParallelLinear
from services.executor.model.states.catalog import STATE_KINDS

RecurrentKind = Literal["delta", "scan", "short"]


class CannotLower(Exception):
    """The model has another shape; says which."""


@dataclass(frozen=True)
class RecurrentShape:
    """The numbers of `rz_recurrent` (`native/decoder.h`), of one rank's share."""

    kind: RecurrentKind
    heads: int
    value_dim: int
    groups: int
    key_dim: int
    taps: int
    eps: float
    norms: int  # norms of a whole row, on whatever ranks, of `norm_columns` each
    norm_columns: int
    activated: bool = True
    gate_first: bool = False
    norm_first: int = 0
    shares_norm: bool = False
    least_step: float = 0.0
    most_step: float = float("inf")
    first_output: int = 0


@dataclass(frozen=True)
class OutputRows:
    """Outputs [first, stop) of a linear layer."""

    linear: LinearShard
    first: int
    stop: int

    @classmethod
    def all(cls, linear: Any) -> "OutputRows":
        return cls(linear, 0, linear.stored.shape[0])


@dataclass(frozen=True)
class Recurrent:
    """A layer's module with recurrent state."""

    module: nn.Module
    shape: RecurrentShape
    inputs: list[OutputRows]  # what it projects, in the order of `native/recurrent.h`
    output: LinearShard
    # float32: `weights` [taps, channels] and, where there are, `bias`, `rates`, `step_bias`, `skips`, `norm`
    tensors: dict[str, Tensor]


def lower_recurrent(module: Any) -> Recurrent:
    """Raises `CannotLower` for a module of a class that no kind of state names, or whose numbers no kernel takes."""
    name = type(module).__name__
    for kind in STATE_KINDS:
        if name in kind.lowered:
            lowered: Recurrent = resolve_name(kind.lowered[name])(module)
            return lowered
    raise CannotLower(f"a {name} is not among the recurrent layers that are lowered")


def _convolution(convolution: Any) -> dict[str, Tensor]:
    tensors = {"weights": convolution.weight.detach().float().squeeze(1).T.contiguous()}
    if convolution.bias is not None:
        tensors["bias"] = convolution.bias.detach().float().contiguous()
    return tensors


def _float(parameter: Tensor) -> Tensor:
    return parameter.detach().float().contiguous()


def _first_output(output: Any, value_dim: int) -> int:
    if not isinstance(output, RowParallelLinear):
        raise CannotLower("a recurrent layer's output is not split over the ranks")
    return output.skip // value_dim


def gated_delta(module: Any) -> Recurrent:
    heads, groups = int(module.num_v_heads), int(module.num_k_heads)
    key_dim, value_dim = int(module.head_k_dim), int(module.head_v_dim)
    if module.activation not in ("silu", "swish"):
        raise CannotLower(f"the activation {module.activation} of a convolution is not among those that are lowered")
    shape = RecurrentShape(
        kind="delta",
        heads=heads,
        value_dim=value_dim,
        groups=groups,
        key_dim=key_dim,
        taps=int(module.conv_kernel_size),
        eps=float(module.layer_norm_epsilon),
        norms=heads,
        norm_columns=value_dim,
        first_output=_first_output(module.out_proj, value_dim),
    )
    own = {
        "rates": -torch.exp(_float(module.A_log)),
        "step_bias": _float(module.dt_bias),
        "norm": _float(module.norm.weight).repeat(heads),
    }
    inputs = _by_group(module, shape) if hasattr(module, "in_proj_qkvz") else _one_by_one(module)
    return Recurrent(module, shape, inputs, module.out_proj, {**_convolution(module.conv1d), **own})


def _one_by_one(module: Any) -> list[OutputRows]:
    return [OutputRows.all(getattr(module, f"in_proj_{name}")) for name in ("qkv", "z", "b", "a")]


def _by_group(module: Any, shape: RecurrentShape) -> list[OutputRows]:
    """Of rows that come key head by key head: query, key, its heads' values and gates; their betas and decays."""
    each = shape.heads // shape.groups
    sizes = (shape.key_dim, shape.key_dim, each * shape.value_dim, each * shape.value_dim)
    return [
        *_of_groups(module.in_proj_qkvz, shape.groups, sizes),
        *_of_groups(module.in_proj_ba, shape.groups, (each, each)),
    ]


def _of_groups(linear: Any, groups: int, sizes: tuple[int, ...]) -> list[OutputRows]:
    whole, rows = sum(sizes), []
    for at, size in enumerate(sizes):
        begin = sum(sizes[:at])
        rows += [OutputRows(linear, first, first + size) for first in range(begin, groups * whole + begin, whole)]
    return rows


def state_space(module: Any) -> Recurrent:
    """Mamba 2's mixer, as `parallel/mixers/state_space.py` splits it."""
    norm, width = module.norm, int(module.head_dim)
    if module.activation not in ("silu", "swish") or not (norm.norms and norm.gate_first):
        raise CannotLower("a Mamba 2 mixer has another activation, or norms no gated outputs")
    heads, key_dim = module.A_log.shape[0], int(module.ssm_state_size)
    inner, channels = heads * width, module.conv1d.out_channels
    least, most = module.time_step_limit
    shape = RecurrentShape(
        kind="scan",
        heads=heads,
        value_dim=width,
        groups=(channels - inner) // (2 * key_dim),
        key_dim=key_dim,
        taps=int(module.conv_kernel_size),
        eps=float(norm.epsilon),
        norms=norm.all_groups if norm.spans_ranks else inner // norm.width,
        norm_columns=norm.width,
        gate_first=True,
        norm_first=norm.columns.start if norm.spans_ranks else 0,
        shares_norm=norm.spans_ranks,
        least_step=float(least),
        most_step=float(most),
        first_output=_first_output(module.out_proj, width),
    )
    own = {
        "rates": -torch.exp(_float(module.A_log)),
        "step_bias": _float(module.dt_bias),
        "skips": _float(module.D),
        "norm": _float(norm.weight),
    }
    projected = module.in_proj
    inputs = [
        OutputRows(projected, inner, inner + channels),
        OutputRows(projected, 0, inner),
        OutputRows(projected, inner + channels, inner + channels + heads),
    ]
    return Recurrent(module, shape, inputs, module.out_proj, {**_convolution(module.conv1d), **own})
