"""One recurrent layer of the native kernels over slots of its own, and what it comes to in float64."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.executor.native.library import RzModel, RzRecurrent, RzStep, load_library

KINDS = {"delta": 0, "scan": 1, "short": 2}


class Shape(NamedTuple):
    kind: str
    heads: int
    value_dim: int
    groups: int
    key_dim: int
    taps: int
    bias: bool
    norm: str  # `head`, `group` (behind the gate), or none

    @property
    def inner(self) -> int:
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        return self.inner + (0 if self.kind == "short" else 2 * self.groups * self.key_dim)

    @property
    def projected(self) -> int:
        if self.kind == "short":
            return 3 * self.inner
        return self.channels + self.inner + self.heads * (2 if self.kind == "delta" else 1)


SHAPES = {
    "delta": Shape("delta", 4, 48, 2, 32, 4, False, "head"),
    "delta wide": Shape("delta", 1, 144, 1, 128, 4, False, "head"),
    "delta even": Shape("delta", 2, 128, 2, 64, 2, True, "head"),
    "scan": Shape("scan", 4, 32, 2, 48, 4, True, "group"),
    "scan in one group": Shape("scan", 6, 48, 1, 128, 3, False, "group"),
    "scan without norm": Shape("scan", 2, 16, 2, 16, 4, True, ""),
    "short": Shape("short", 1, 96, 1, 16, 3, False, ""),
    "short with bias": Shape("short", 1, 32, 1, 16, 4, True, ""),
}


class Piece(NamedTuple):
    """Rows of one sequence in one step."""

    slot: int
    position: int
    rows: Tensor  # float32 [rows, projected], values of bf16


class Layer:
    """A layer with random weights."""

    def __init__(self, shape: Shape, seed: int = 0, slots: int = 8, window: int | None = None) -> None:
        made = torch.Generator().manual_seed(seed)

        def some(*size: int) -> Tensor:
            return torch.randn(size, generator=made)

        self.shape, heads = shape, shape.heads
        self.weights = some(shape.taps, shape.channels) * 0.4
        self.bias = some(shape.channels) * 0.2 if shape.bias else None
        self.rates = -torch.exp(some(heads) * 0.5)
        self.step_bias, self.skips = some(heads), some(heads)
        self.norm = 1 + 0.1 * some(shape.inner) if shape.norm else None
        self.limits = (0.05, 1.5) if shape.kind == "scan" else (0.0, float("inf"))
        length = shape.taps - 1 if window is None else window
        # Whatever is in a slot before its sequence begins is not read.
        self.window = torch.full((slots, shape.channels, length), torch.nan, dtype=torch.bfloat16)
        self.state = torch.full((slots, heads, shape.key_dim * shape.value_dim), torch.nan)

    def describe(self, slots: Tensor) -> RzRecurrent:
        """`slots`: uint8 [slots, bytes], where each begins with the window and ends with the state."""
        shape = self.shape
        columns = shape.inner // shape.groups if shape.norm == "group" else shape.value_dim
        window_bytes = self.window[0].nbytes
        made = RzRecurrent(
            kind=KINDS[shape.kind], heads=shape.heads, value_dim=shape.value_dim, groups=shape.groups,
            key_dim=shape.key_dim, taps=shape.taps, activated=shape.kind != "short",
            window_length=self.window.shape[2], gate_first=shape.kind == "scan", norms=shape.inner // columns,
            norm_columns=columns, eps=1e-6, least_step=self.limits[0], most_step=self.limits[1],
            window=slots.data_ptr(), state=slots.data_ptr() + window_bytes, slot_stride=slots.shape[1],
        )  # fmt: skip
        for name in ("weights", "bias", "rates", "step_bias", "skips", "norm"):
            if (tensor := getattr(self, name)) is not None:
                setattr(made, name, tensor.data_ptr())
        return made


class Recurring:
    """Runs steps of a layer."""

    def __init__(self, layer: Layer, threads: int = 2) -> None:
        self.layer = layer
        parts = [layer.window.flatten(1).view(torch.uint8), layer.state.flatten(1).view(torch.uint8)]
        self.slots = torch.cat(parts, dim=1).contiguous()
        self._described = layer.describe(self.slots)
        self._library: Any = load_library()
        self._decoder = self._library.rz_decoder_new(ctypes.byref(RzModel()), threads, None)

    def close(self) -> None:
        self._library.rz_decoder_free(self._decoder)

    def step(self, pieces: Sequence[Piece], snapshots: Sequence[tuple[int, int]] = ()) -> list[Tensor]:
        """Of each piece bf16 [rows, inner]; `snapshots`: (row of the step, slot)."""
        rows = torch.cat([piece.rows for piece in pieces]).contiguous()
        lens = [len(piece.rows) for piece in pieces]
        held = {
            "positions": [at for piece in pieces for at in range(piece.position, piece.position + len(piece.rows))],
            "query_lens": lens,
            "state_slots": [piece.slot for piece in pieces],
            "state_snapshots": [value for pair in snapshots for value in pair],
        }  # fmt: skip
        arrays = {name: np.array(values, np.int32) for name, values in held.items()}
        step = RzStep(
            tokens=len(rows), sequences=len(pieces), num_states=len(pieces), num_snapshots=len(snapshots),
            **{name: array.ctypes.data for name, array in arrays.items()},
        )  # fmt: skip
        out = torch.empty((len(rows), self.layer.shape.inner), dtype=torch.bfloat16)
        described = ctypes.byref(self._described)
        failed = self._library.rz_decoder_recur(
            self._decoder, described, ctypes.byref(step), rows.data_ptr(), out.data_ptr()
        )
        assert not failed
        return list(out.split(lens))


def rows_of(shape: Shape, count: int, seed: int) -> Tensor:
    """float32 [count, projected], values of bf16."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn((count, shape.projected), generator=made).bfloat16().float()


def expected(layer: Layer, rows: Tensor) -> Tensor:
    """A whole sequence in float64 [rows, inner], by the definitions."""
    shape, rows = layer.shape, rows.double()
    mixed, gate, rest = rows.split([shape.channels, shape.inner, rows.shape[1] - shape.channels - shape.inner], 1)
    if shape.kind == "short":
        mixed = (mixed * rest).bfloat16().double()  # as the window keeps it
    bias = None if layer.bias is None else layer.bias.double()
    before = torch.cat((mixed.new_zeros(shape.taps - 1, shape.channels), mixed)).T.unsqueeze(0)
    mixed = functional.conv1d(before, layer.weights.double().T.unsqueeze(1), bias, groups=shape.channels)[0].T
    if shape.kind == "short":
        return gate * mixed
    mixed = functional.silu(mixed)
    scanned = _delta(layer, mixed, rest) if shape.kind == "delta" else _scan(layer, mixed, rest)
    gate = functional.silu(gate)
    if shape.norm == "":
        return scanned * gate
    assert layer.norm is not None
    if shape.norm == "head":
        return _normed(scanned, shape.value_dim) * layer.norm.double() * gate
    return _normed(scanned * gate, shape.inner // shape.groups) * layer.norm.double()


def _normed(x: Tensor, columns: int) -> Tensor:
    return functional.rms_norm(x.unflatten(1, (-1, columns)), (columns,), eps=1e-6).flatten(1)


def _delta(layer: Layer, mixed: Tensor, gates: Tensor) -> Tensor:
    shape = layer.shape
    keys = shape.groups * shape.key_dim
    query, key, value = mixed.split([keys, keys, shape.inner], 1)
    query, key = (
        part.unflatten(1, (shape.groups, -1)).repeat_interleave(shape.heads // shape.groups, 1) for part in (query, key)
    )
    query, key = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (query, key))
    value = value.unflatten(1, (shape.heads, -1))
    beta, step = gates.chunk(2, 1)
    decay = torch.exp(layer.rates * functional.softplus(step + layer.step_bias))
    state = mixed.new_zeros(shape.heads, shape.key_dim, shape.value_dim)
    out = []
    for at in range(len(mixed)):
        state = state * decay[at, :, None, None]
        change = (value[at] - torch.einsum("hkv,hk->hv", state, key[at])) * beta[at].sigmoid()[:, None]
        state = state + torch.einsum("hk,hv->hkv", key[at], change)
        out.append(torch.einsum("hkv,hk->hv", state, query[at]).flatten() * shape.key_dim**-0.5)
    return torch.stack(out)


def _scan(layer: Layer, mixed: Tensor, steps: Tensor) -> Tensor:
    shape = layer.shape
    keys = shape.groups * shape.key_dim
    value, into, out_of = mixed.split([shape.inner, keys, keys], 1)
    into, out_of = (
        part.unflatten(1, (shape.groups, -1)).repeat_interleave(shape.heads // shape.groups, 1)
        for part in (into, out_of)
    )
    value = value.unflatten(1, (shape.heads, -1))
    step = functional.softplus(steps + layer.step_bias).clamp(*layer.limits)
    state = mixed.new_zeros(shape.heads, shape.value_dim, shape.key_dim)
    out = []
    for at in range(len(mixed)):
        state = state * torch.exp(layer.rates * step[at])[:, None, None]
        state = state + torch.einsum("h,hv,hk->hvk", step[at], value[at], into[at])
        found = torch.einsum("hvk,hk->hv", state, out_of[at]) + layer.skips[:, None] * value[at]
        out.append(found.flatten())
    return torch.stack(out)
