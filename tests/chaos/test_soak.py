"""Random faults: the schedule is a function of its seed, and a short soak runs through."""

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.faults import all_faults
from tests.chaos.schedule import LONGEST_OVERLAP, LONGEST_PAUSE, compatible, rounds
from tests.chaos.soak import soak


@given(st.integers(0, 2**32 - 1))
def test_a_seed_says_everything(seed: int) -> None:
    assert list(islice(rounds(seed), 20)) == list(islice(rounds(seed), 20))


@given(st.integers(0, 2**32 - 1))
def test_two_faults_at_once_can_both_be_noticed(seed: int) -> None:
    for strikes in islice(rounds(seed), 50):
        assert 1 <= len(strikes) <= 2
        assert all(0 <= strike.after <= LONGEST_PAUSE + LONGEST_OVERLAP for strike in strikes)
        assert len(strikes) == 1 or compatible(*strikes)


def test_every_fault_comes_in_time() -> None:
    drawn = {strike.fault for strikes in islice(rounds(0), 300) for strike in strikes}
    assert drawn == set(all_faults())


@pytest.mark.chaos
@pytest.mark.timeout(400)
async def test_a_short_soak(tmp_path: Path) -> None:
    await soak(seed=4, minutes=1.0, directory=tmp_path)
