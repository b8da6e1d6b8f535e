"""Where a step's arrays come to lie, and that they get there."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="what runs on GPUs is tested where Triton is (Linux on x86-64)")

from services.executor.core.step_plan import StepLimits
from services.executor.gpu.inputs import ALIGN, Staging, capacity_of, places_of, to_device, total_of
from services.executor.platforms.base import sent
from tests.pretend_gpu.streams import Host

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(0, 3 * ALIGN), max_size=12)


@given(LENGTHS)
def test_places_are_aligned_and_do_not_overlap(lengths: list[int]) -> None:
    places = places_of(lengths)
    assert len(places) == len(lengths) + 1
    assert all(place % ALIGN == 0 for place in places)
    for start, following, length in zip(places, places[1:], lengths, strict=False):
        assert start + length <= following < start + length + ALIGN


@given(st.lists(LENGTHS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_what_is_staged_is_what_the_views_hold(steps: list[list[int]], random: object) -> None:
    numbers = np.random.default_rng(0)
    staging = Staging(max(1, *(total_of(lengths) for lengths in steps)), CPU)
    for lengths in steps:
        arrays = [numbers.integers(-5, 1 << 30, length) for length in lengths]
        assert staging.fits(arrays)
        staging.stage(arrays)
        for array, view, own in zip(arrays, staging.views(lengths), to_device(arrays, CPU), strict=True):
            assert view.tolist() == own.tolist() == array.tolist()


def test_what_is_sent_to_a_gpu_goes_through_pinned_memory_and_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[torch.Tensor] = []
    calls: list[tuple[bool, torch.device, bool]] = []
    to = torch.Tensor.to

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def copy(tensor: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        calls.append((tensor is pinned[-1], device, non_blocking))
        return to(tensor, CPU)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    gpu = torch.device("cuda", 1)
    assert sent(np.array([[1, 2]]), gpu).tolist() == [[1, 2]]
    (own,) = to_device([np.array([3, 4])], gpu)
    assert own.tolist() == [3, 4]
    assert calls == [(True, gpu, True)] * 2


def test_pinned_memory_is_not_written_while_the_device_reads_it(gpu: Host) -> None:
    staging = Staging(1024, torch.device("cuda", 0))
    for step in range(4):
        staging.stage([np.full(5, step)])
    torch.cuda.synchronize()  # where the simulated GPU says what was wrong
    assert staging.views([5])[0].tolist() == [3] * 5


def test_the_arrays_of_equal_lengths_lie_at_the_same_addresses() -> None:
    staging = Staging(1024, CPU)
    lengths = [5, 40, 7]
    staging.stage([np.arange(length) for length in lengths])
    before = [view.data_ptr() for view in staging.views(lengths)]
    staging.stage([np.arange(length) for length in (100, 2)])
    staging.stage([np.arange(length) for length in lengths])
    assert [view.data_ptr() for view in staging.views(lengths)] == before
    *fixed, behind = staging.open_views(lengths[:2])
    assert [view.data_ptr() for view in fixed] == before[:2]
    assert behind.data_ptr() == before[2]
    assert behind[:7].tolist() == list(range(7))


@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 50))
def test_the_limits_hold_the_largest_steps(sequences: int, tokens: int, blocks: int) -> None:
    limits = StepLimits(sequences, tokens, blocks * 4, 0)
    per_tile = 1  # at worst
    most = max(tokens, sequences)
    for decodes in (0, sequences // 2, sequences):
        chunk_tokens = max(most - decodes, 0)
        lengths = [most] * 4 + [sequences, sequences + 1, sequences]
        lengths += [decodes] * 2 + [chunk_tokens // per_tile] * 2 + [sequences * blocks]
        assert total_of(lengths) <= capacity_of(limits, 4)


def test_what_does_not_fit_is_told() -> None:
    staging = Staging(2 * ALIGN, CPU)
    assert staging.fits([np.zeros(ALIGN), np.zeros(1)])  # type: ignore[list-item]
    assert not staging.fits([np.zeros(ALIGN), np.zeros(ALIGN + 1)])  # type: ignore[list-item]
