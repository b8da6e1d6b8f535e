"""Candidates and draws by the native kernels are those by PyTorch, at every level."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.executor.collectives.base import SingleRank
from services.executor.core.engine import BadLogits, GrammarFailed, SampledToken
from services.executor.core.sampling_state import Mask, SamplingState
from services.executor.cpu.sampling import NativeRows
from services.executor.native.library import RzModel, kernels_at, levels
from services.executor.sampling.candidates import WANT, Few, TorchRows, Wants, collect
from services.executor.sampling.sampler import Sampler, wants_of
from shared.errors import ConfigurationError
from shared.messages import SamplingParams
from tests.unit.executor.sampling.test_candidates import (
    ACTIVE,
    assert_same,
    counts,
    logits_of,
    of_leader,
    params_,
    tokens_,
)

THREADS = 2
WIDTHS = (1, 5, 16, 63, 64, 157, 1000, 5003)
FILTERS: tuple[dict[str, object], ...] = (
    {},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_p": 0.999999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.5},
    {"top_k": 1},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 700},
    {"temperature": 1e-6, "top_p": 0.5},
    {"temperature": 0.0},
)


@pytest.fixture(scope="module", params=levels())
def rows(request: pytest.FixtureRequest) -> Iterator[NativeRows]:
    library, model = kernels_at(request.param), RzModel()
    handle = library.rz_decoder_new(ctypes.byref(model), THREADS, None)
    yield NativeRows(library, handle)
    library.rz_decoder_free(handle)


def states_of(*params: dict[str, object], seeds: int = 1) -> list[SamplingState]:
    every = [(one, seed) for one in params for seed in range(seeds)]
    return [SamplingState(SamplingParams(**{"seed": seed, **one}), [1, 2], [3, 3]) for one, seed in every]  # type: ignore[arg-type]


def drawn(rows: NativeRows, logits: torch.Tensor, states: list[SamplingState], cuts: list[int]) -> list[SampledToken]:
    """From what rank 0 gets when each rank has its span of `logits`."""
    wants, widths = wants_of(states, logits.shape[1]), np.diff([0, *cuts, logits.shape[1]]).tolist()
    search = None if cuts else rows  # one caller at a time
    found = of_leader(logits, widths, lambda local, ring: collect(local, wants, ring, widths, search))
    return Sampler(rows).sample(found, states)


@pytest.mark.parametrize("width", WIDTHS)
def test_draws_are_pytorchs(rows: NativeRows, width: int) -> None:
    states = states_of(*FILTERS, *({name: value} for name, value in ACTIVE.items() if width > 5), seeds=20)
    logits = logits_of(width, len(states), torch.float32, width)
    expected = Sampler().sample(logits, states)
    assert_same(drawn(rows, logits, states, []), expected)
    if width > 5:
        assert_same(drawn(rows, logits, states, [width // 3, width - 2]), expected)


class RandomMask:
    """A grammar that lets a tenth of the tokens follow."""

    complete = False

    def __init__(self, width: int, seed: int) -> None:
        self._mask = np.random.default_rng(seed).random(width) < 0.1
        self._mask[seed % width] = True

    def allowed(self) -> Mask:
        return self._mask


@pytest.mark.parametrize("width", WIDTHS)
def test_draws_under_masks_are_pytorchs(rows: NativeRows, width: int) -> None:
    of_few = {"allowed_token_ids": tuple(range(0, width, 3))}
    edited = ({"logit_bias": {width // 2: 5.0}}, {"frequency_penalty": 1.0} if width > 5 else {})
    states = states_of(*FILTERS, *edited, of_few, *({**of_few, **one} for one in edited), seeds=10)
    for row, state in enumerate(states):
        if row % 3:
            state.grammar = RandomMask(width, row)  # type: ignore[assignment]
    logits = logits_of(width, len(states), torch.float32, width)
    may = [mask_of(state, width) for state in states]
    left_out = [row for row, allowed in enumerate(may) if not allowed.any()]
    if left_out:
        for sampler in (Sampler(rows), Sampler()):
            with pytest.raises(GrammarFailed, match="leave no next token") as caught:
                sampler.sample(logits, states)
            assert caught.value.rows == left_out
    chosen = [row for row in range(len(states)) if row not in left_out]
    logits, states = logits[chosen], [states[row] for row in chosen]
    found = drawn(rows, logits, states, [])
    assert_same(found, Sampler().sample(logits, states))
    assert all(may[row][sampled.token] for row, sampled in zip(chosen, found, strict=True))


def mask_of(state: SamplingState, width: int) -> Mask:
    every = np.ones(width, np.bool_) if state.grammar is None else state.grammar.allowed().copy()
    return every & (np.arange(width) % 3 == 0) if state.params.allowed_token_ids else every


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(tokens_, tokens_, params_), min_size=1, max_size=5), st.integers(0, 9999))
def test_any_parameters_draw_what_they_draw_by_pytorch(
    rows: NativeRows, sequences: list[tuple[list[int], list[int], dict[str, object]]], seed: int
) -> None:
    logits = logits_of(seed, len(sequences), torch.float32)
    states = [SamplingState(SamplingParams(**params), *known) for *known, params in sequences]  # type: ignore[arg-type]
    assert_same(drawn(rows, logits, states, []), Sampler().sample(logits, states))


def as_lists(few: Few) -> tuple[list[int], ...]:
    return few.rows.tolist(), few.ids.tolist(), few.values.tolist(), few.lengths.tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_largest_and_their_ties_are_pytorchs(rows: NativeRows, width: int) -> None:
    wants = counts(2, -3, 10, 40, 600, 1024, 5, 5, 5)
    logits = logits_of(7, 12, torch.float32, width)
    logits[6], logits[7], logits[8, 1:] = 0.5, -torch.inf, -torch.inf
    chosen = np.array([0, 2, 3, 4, 5, 1, 6, 7, 8])
    assert as_lists(rows.few(logits, chosen, wants, 100)) == as_lists(TorchRows().few(logits, chosen, wants, 100))


def near(*asked: tuple[float, float, float]) -> Wants:
    return np.array([(0, *one) for one in asked], WANT)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_nucleus_is_among_those_near_the_largest(rows: NativeRows, width: int) -> None:
    temperatures, shares = [0.1, 1.0, 5.0] * 4, np.repeat([0.2, 0.9, 0.999, 1.0], 3)
    wants = near(*((one, one * 12, share) for one, share in zip(temperatures, shares, strict=True)))
    logits, every = logits_of(width, 12, torch.float32, width), np.arange(12)
    largest = logits.amax(-1).numpy()
    expected, totals = TorchRows().near(logits, every, wants, largest, 0, alone=False)
    found, weights = rows.near(logits, every, wants, largest, 0, alone=False)
    np.testing.assert_allclose(weights, totals, rtol=1e-6)
    assert set(zip(expected.rows, expected.ids, strict=True)) <= set(zip(found.rows, found.ids, strict=True))
    narrow, _ = rows.near(logits, every, wants, largest, 0, alone=True)
    assert set(zip(narrow.rows, narrow.ids, strict=True)) <= set(zip(found.rows, found.ids, strict=True))
    exact = ((logits - logits.amax(-1, keepdim=True)).double() / torch.tensor(temperatures)[:, None]).exp()
    for row, share in enumerate(shares.tolist()):
        ids = narrow.ids[narrow.rows == row]
        left_out = np.setdiff1d(np.arange(width), ids)
        assert exact[row, ids].sum() >= min(share, 1 - 1e-4) * exact[row].sum()
        assert not len(left_out) or exact[row, left_out].max() < exact[row, ids].min()


def test_few_are_looked_at_where_few_hold_the_share(rows: NativeRows) -> None:
    logits = torch.linspace(0, -40, 5003)[None]
    found, _ = rows.near(logits, np.array([0]), near((1.0, 20.0, 0.9)), np.zeros(1, np.float32), 0, alone=True)
    assert 287 < found.lengths[0] < 600  # of 2,500 within the margin


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", FILTERS)
def test_rows_that_are_no_numbers_are_told(rows: NativeRows, bad: float, params: dict[str, object]) -> None:
    logits = logits_of(1, 3, torch.float32, 157)
    logits[1, 150] = bad
    with pytest.raises(BadLogits) as told:
        drawn(rows, logits, states_of(params, seeds=3), [])
    assert told.value.rows == [1]


def test_what_cannot_come_is_not_drawn(rows: NativeRows) -> None:
    logits = torch.full((200, 300), -torch.inf)
    logits[:, 7], logits[:, 290] = 0.0, -1.0
    for params in FILTERS:
        found = drawn(rows, logits, states_of(params, seeds=200), [])
        assert {one.token for one in found} <= {7, 290}


def test_every_level_draws_and_weighs_the_same() -> None:
    logits, states = logits_of(3, 40, torch.float32, 5003), states_of(*FILTERS, seeds=4)[:40]
    told = set()
    for level in levels():
        library, model = kernels_at(level), RzModel()
        handle = library.rz_decoder_new(ctypes.byref(model), THREADS, None)
        rows = NativeRows(library, handle)
        found = collect(logits, wants_of(states, 5003), SingleRank(), [5003], rows)
        tables = [
            (table.scores.numpy().tobytes(), table.totals is None or table.totals.tolist()) for table in found.tables
        ]
        told.add(repr((tables, [one.token for one in Sampler(rows).sample(found, states)])))
        library.rz_decoder_free(handle)
    assert len(told) == 1


def test_tables_of_other_types_are_copied(rows: NativeRows) -> None:
    """A draft head may compute by PyTorch, in bf16."""
    states = states_of({}, {"logprobs": 3}, {"top_p": 0.9, "logprobs": 2}, seeds=30)
    logits = logits_of(2, len(states), torch.bfloat16)
    found = collect(logits, wants_of(states, logits.shape[1]), SingleRank(), [logits.shape[1]])
    assert_same(Sampler(rows).sample(found, states), Sampler().sample(logits, states))  # type: ignore[arg-type]


def test_without_memory_it_says_so(rows: NativeRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_library", type("Full", (), {"rz_decoder_draw": staticmethod(lambda *_: 1)}))
    with pytest.raises(ConfigurationError, match="no memory for sampling"):
        Sampler(rows).sample(logits_of(1, 1, torch.float32), states_of({}))
