"""The native kernels of recurrent layers: right, and to the bit the same however steps are cut."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.unit.executor.cpu.recurring import SHAPES, Layer, Piece, Recurring, expected, rows_of
from tests.unit.executor.model.lanes import natively

pytestmark = natively

ROWS = 37


@pytest.fixture(params=SHAPES)
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(SHAPES[request.param])


def whole(layer: Layer, rows: Tensor, threads: int = 2) -> tuple[Tensor, Tensor]:
    """(what comes out, slot 0 behind it) of a sequence alone, in one piece."""
    recurring = Recurring(layer, threads)
    (out,) = recurring.step([Piece(0, 0, rows)])
    recurring.close()
    return out, recurring.slots[0].clone()


def test_is_what_the_definition_says(layer: Layer) -> None:
    rows = rows_of(layer.shape, ROWS, 1)
    out, truth = whole(layer, rows)[0].double(), expected(layer, rows)
    assert truth.std() > 0.05, "too flat for the comparison to mean anything"
    # Nothing but the last rounding, to bf16, is seen.
    assert ((out - truth).abs() <= truth.abs() * 2**-8 + 1e-5 * truth.std()).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_chunks_neighbours_or_threads(layer: Layer, threads: int) -> None:
    rows, others = rows_of(layer.shape, ROWS, 1), rows_of(layer.shape, ROWS, 2)
    out, slot = whole(layer, rows)
    recurring = Recurring(layer, threads)
    found, done = [], 0
    for number, size in enumerate((1, 1, 2, 17, 1, 1, 3, 9, 1, 1)):
        beside = Piece(5, number, others[number : number + 1])
        chunk = Piece(3, done, rows[done : done + size])
        found.append(recurring.step([beside, chunk] if number % 3 else [chunk, Piece(1, 0, others)])[number % 3 > 0])
        if number % 3 == 0:
            recurring.step([beside])
        done += size
    assert done == ROWS
    assert torch.equal(torch.cat(found).view(torch.int16), out.view(torch.int16))
    assert torch.equal(recurring.slots[3], slot)
    recurring.close()


def test_many_decodes_at_once_are_as_many_alone(layer: Layer) -> None:
    rows = [rows_of(layer.shape, 6, seed) for seed in range(5)]
    recurring = Recurring(layer, threads=2)
    for slot, own in enumerate(rows):
        recurring.step([Piece(slot, 0, own[:3])])
    batches = [recurring.step([Piece(slot, at, own[at : at + 1]) for slot, own in enumerate(rows)]) for at in (3, 4, 5)]
    for slot, own in enumerate(rows):
        out, state = whole(layer, own)
        assert torch.equal(torch.cat([batch[slot] for batch in batches]), out[3:])
        assert torch.equal(recurring.slots[slot], state)
    recurring.close()


@pytest.mark.parametrize("at", [0, 1, 2, 16, ROWS - 1])
def test_a_snapshot_is_the_state_behind_its_row(layer: Layer, at: int) -> None:
    rows = rows_of(layer.shape, ROWS, 1)
    out, slot = whole(layer, rows)
    behind = whole(layer, rows[: at + 1])[1]
    recurring = Recurring(layer)
    first = recurring.step([Piece(4, 0, rows[:1]), Piece(0, 0, rows)], [(1 + at, 2), (0, 3), (1 + at, 6)])[1]
    assert torch.equal(first, out)
    assert torch.equal(recurring.slots[0], slot)
    assert torch.equal(recurring.slots[2], behind)
    assert torch.equal(recurring.slots[6], behind)
    assert torch.equal(recurring.slots[3], whole(layer, rows[:1])[1])
    for rest in rows[at + 1 :].split(1):
        recurring.step([Piece(2, at + 1, rest)])
    assert at + 1 == ROWS or not torch.equal(recurring.slots[2], behind)
    recurring.close()


def test_goes_on_from_a_snapshot(layer: Layer) -> None:
    rows = rows_of(layer.shape, ROWS, 1)
    out, slot = whole(layer, rows)
    recurring = Recurring(layer)
    recurring.step([Piece(0, 0, rows)], [(20, 2)])
    found = recurring.step([Piece(2, 21, rows[21:22])]) + recurring.step([Piece(2, 22, rows[22:])], [(14, 7)])
    assert torch.equal(torch.cat(found), out[21:])
    assert torch.equal(recurring.slots[2], slot)
    assert torch.equal(recurring.slots[7], slot)
    recurring.close()


def test_a_window_may_keep_more_than_the_convolution_reads() -> None:
    shape = SHAPES["delta"]
    rows = rows_of(shape, ROWS, 1)
    exact, wider = Layer(shape), Layer(shape, window=shape.taps)
    out = whole(exact, rows)[0]
    recurring = Recurring(wider)
    found = [recurring.step([Piece(0, at, rows[at : at + 1])])[0] for at in range(ROWS)]
    assert torch.equal(torch.cat(found), out)
    recurring.close()


@pytest.fixture
def modules() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.usefixtures("modules")
def test_the_definitions_are_those_of_transformers() -> None:
    """What the other tests hold the kernels against, against transformers' functions for prompts and for decoding."""
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    from tests.unit.executor.cpu.recurring import _delta, _scan

    layer = Layer(SHAPES["delta"])
    shape, mixed = layer.shape, rows_of(layer.shape, ROWS, 3)
    rows = mixed[:, : shape.channels]
    made = theirs.causal_conv1d_fn(rows.T.unsqueeze(0), layer.weights.T.contiguous(), layer.bias, "silu")[0].T
    gates = mixed[:, -2 * shape.heads :]
    keys = shape.groups * shape.key_dim
    query, key, value = (
        part.unflatten(1, (heads, -1)).unsqueeze(0)
        for part, heads in zip(
            made.split([keys, keys, shape.inner], 1), (shape.groups, shape.groups, shape.heads), strict=True
        )
    )
    decay = layer.rates * torch.nn.functional.softplus(gates[:, shape.heads :] + layer.step_bias)
    for compute in (theirs.torch_recurrent_gated_delta_rule, theirs.torch_chunk_gated_delta_rule):
        out, _ = compute(
            query, key, value, decay.unsqueeze(0), gates[:, : shape.heads].sigmoid().unsqueeze(0),
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        ours = _delta(layer, made.double(), gates.double())
        assert (out[0].flatten(1) - ours).abs().max() < 1e-5
    layer = Layer(SHAPES["scan"])
    shape, made = layer.shape, rows_of(layer.shape, ROWS, 3)
    keys = shape.groups * shape.key_dim
    value, into, out_of, steps = made[:, : shape.channels + shape.heads].split(
        [shape.inner, keys, keys, shape.heads], 1
    )
    out = mamba2_chunk_scan(
        value.unflatten(1, (shape.heads, -1)).unsqueeze(0), steps.unsqueeze(0), layer.rates,
        into.unflatten(1, (shape.groups, -1)).unsqueeze(0), out_of.unflatten(1, (shape.groups, -1)).unsqueeze(0),
        chunk_size=16, D=layer.skips, dt_bias=layer.step_bias, dt_softplus=True, dt_limit=layer.limits,
    )  # fmt: skip
    ours = _scan(layer, made[:, : shape.channels].double(), steps.double())
    assert (out[0].flatten(1) - ours).abs().max() < 1e-4


def test_states_go_behind_any_rows_beside_decodes_that_keep_none(layer: Layer) -> None:
    """In any order, and of one row to several slots."""
    rows, others = rows_of(layer.shape, 9, 1), rows_of(layer.shape, 2, 2)
    recurring = Recurring(layer)
    recurring.step([Piece(1, 0, others[:1])])
    copies = [(6, 3), (1, 4), (6, 5), (2, 6), (9, 7)]
    beside, _ = recurring.step([Piece(1, 1, others[1:]), Piece(0, 0, rows)], copies)
    for row, slot in copies:
        assert torch.equal(recurring.slots[slot], whole(layer, rows[:row])[1]), row
    assert torch.equal(beside.view(torch.int16), whole(layer, others)[0][1:].view(torch.int16))
    assert torch.equal(recurring.slots[1], whole(layer, others)[1])
    recurring.close()
