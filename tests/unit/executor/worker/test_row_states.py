"""States by slot: the newest are found, all others are zeros and never another token's."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.worker.drafting.row_states import RowStates

SLOTS, CAPACITY = 24, 7
slots = st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=1, max_size=12)
keeps = st.tuples(st.just("keep"), slots)
copies = st.tuples(st.just("copy"), st.lists(st.integers(0, SLOTS - 1), unique=True, min_size=2, max_size=2))
forgets = st.tuples(st.just("forget"), slots)


@given(st.lists(st.one_of(keeps, copies, forgets), max_size=30))
def test_what_is_found_is_what_was_kept_last(steps: list[tuple[str, list[int]]]) -> None:
    states = RowStates(SLOTS, CAPACITY, 2, torch.float32, torch.device("cpu"))
    kept: dict[int, float] = {}
    for number, (what, given_slots) in enumerate(steps, start=1):
        chosen = np.array(given_slots, np.int32)
        if what == "keep":
            values = {slot: number + at / 100 for at, slot in enumerate(given_slots)}
            states.keep(chosen, torch.tensor([[value, -value] for value in values.values()]))
            kept |= values
            newest = given_slots[-CAPACITY:]
            found = states.at(np.array(newest, np.int32))[:, 0].tolist()
            assert found == torch.tensor([values[slot] for slot in newest]).tolist()
        elif what == "copy":
            known = bool(states.at(chosen[:1]).any())
            states.copy(chosen[:1], chosen[1:])
            if known:
                kept[given_slots[1]] = kept[given_slots[0]]
        else:
            states.forget(chosen)
            kept = {slot: value for slot, value in kept.items() if slot not in given_slots}
        for slot, (first, second) in enumerate(states.at(np.arange(SLOTS, dtype=np.int32)).tolist()):
            assert second == -first
            assert first == 0 or first == torch.tensor(kept[slot]).item()
    assert not states.at(np.array([-1], np.int32)).any()
