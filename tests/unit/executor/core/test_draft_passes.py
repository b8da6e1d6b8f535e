"""The passes of a draft model against positions, slots and blocks counted one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.draft_passes import DraftPasses, plan_for_draft, slots_before
from services.executor.core.engine import DraftPlan
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes

SIZE = 4


@given(
    members=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5),
    count=st.integers(1, 5),
    spare=st.integers(0, 1),
)
def test_each_pass_reaches_as_far_as_its_rows(members: list[tuple[int, int]], count: int, spare: int) -> None:
    """`members`: tokens that the draft model has computed of each sequence, and those that it lacks."""
    members = sorted(members, key=lambda member: member[1] > 1)
    tables = [
        [100 * at + block for block in range(-(-(known + new + count) // SIZE))]
        for at, (known, new) in enumerate(members)
    ]

    def slots(at: int, begin: int, end: int) -> list[int]:
        return [tables[at][position // SIZE] * SIZE + position % SIZE for position in range(begin, end)]

    def up_to(ends: list[int]) -> list[int]:
        return [block for table, end in zip(tables, ends, strict=True) for block in table[: -(-end // SIZE)]]

    ends = [known + new for known, new in members]
    plan = StepPlan(
        step=7,
        num_decodes=[new for _, new in members].count(1),
        token_ids=to_bytes(np.concatenate([np.arange(known, known + new) for known, new in members])),
        positions=to_bytes(np.concatenate([np.arange(known, known + new) for known, new in members])),
        slots=to_bytes([slot for at, (known, new) in enumerate(members) for slot in slots(at, known, known + new)]),
        query_lens=to_bytes([new for _, new in members]),
        context_lens=to_bytes([end + count - 1 + spare for end in ends]),
        block_tables=to_bytes(up_to([end + count - 1 + spare for end in ends])),
        sample_rows=to_bytes(np.cumsum([new for _, new in members]) - 1),
        saves=to_bytes([(1, 2)]),
        of_draft=True,
    )
    behind = [slots(at, end, end + count - 1) for at, end in enumerate(ends)]
    passes = DraftPasses(DraftPlan(plan, count, to_bytes(np.array(behind, np.int32))), SIZE)
    for number in range(count):
        found = passes.plan(number, [50 + at for at in range(len(members))])
        assert found.of_draft
        assert found.step == 7 + number
        assert bool(found.saves) == (number == 0)
        assert as_int32(found.context_lens).tolist() == [end + number for end in ends]
        assert as_int32(found.block_tables).tolist() == up_to([end + number for end in ends])
        if number:
            assert found.num_decodes == len(members)
            assert as_int32(found.token_ids).tolist() == [50 + at for at in range(len(members))]
            assert as_int32(found.positions).tolist() == [end + number - 1 for end in ends]
            assert as_int32(found.slots).tolist() == [row[number - 1] for row in behind]
            assert as_int32(found.sample_rows).tolist() == list(range(len(members)))
        else:
            assert (found.token_ids, found.slots, found.query_lens) == (plan.token_ids, plan.slots, plan.query_lens)


def test_a_draft_model_computes_what_it_knows() -> None:
    plan = StepPlan(
        step=1,
        num_decodes=0,
        token_ids=to_bytes([3, 90, -1, 5]),
        positions=to_bytes([6, 7, 8, 9]),
        slots=to_bytes([6, 7, 8, 9]),
        query_lens=to_bytes([4]),
        context_lens=to_bytes([10]),
        block_tables=to_bytes([0, 1, 2]),
        sample_rows=to_bytes([3]),
        saves=to_bytes([(1, 2)]),
        compressions=to_bytes([(1, 30)]),
        adapters=to_bytes([2]),
        followed=True,
    )
    found = plan_for_draft(plan, 64, 8)
    assert as_int32(found.token_ids).tolist() == [3, 0, 0, 5]
    assert as_int32(found.positions).tolist() == [6, 7, 7, 7]
    assert found.compressions == plan.compressions
    assert (found.saves, found.adapters, found.sample_rows, found.followed) == (b"", b"", b"", False)
    renamed = plan_for_draft(plan, 64, 8, np.array([9, 1, 2, 60, 4, 6], np.int32))
    assert as_int32(renamed.token_ids).tolist() == [60, 0, 0, 6]
    same = plan_for_draft(plan, 128, 32)
    assert as_int32(same.token_ids).tolist() == [3, 90, 0, 5]
    assert same.positions == plan.positions


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5))
def test_the_slot_of_the_token_before(members: list[tuple[int, int]]) -> None:
    """`members`: first position and rows of each sequence, in blocks of its own."""
    tables = [
        [100 * at + block for block in range(-(-(begin + new) // SIZE))] for at, (begin, new) in enumerate(members)
    ]
    rows = [(at, position) for at, (begin, new) in enumerate(members) for position in range(begin, begin + new)]

    def slot(at: int, position: int) -> int:
        return tables[at][position // SIZE] * SIZE + position % SIZE if position >= 0 else -1

    plan = StepPlan(
        step=1,
        num_decodes=0,
        token_ids=to_bytes([0] * len(rows)),
        positions=to_bytes([position for _, position in rows]),
        slots=to_bytes([slot(*row) for row in rows]),
        query_lens=to_bytes([new for _, new in members]),
        context_lens=to_bytes([begin + new for begin, new in members]),
        block_tables=to_bytes([block for table in tables for block in table]),
        sample_rows=b"",
    )
    assert slots_before(plan, SIZE).tolist() == [slot(at, position - 1) for at, position in rows]
