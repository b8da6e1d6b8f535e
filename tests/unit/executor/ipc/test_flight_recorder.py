"""What a rank writes down is what is read of it, however much has been written before."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.executor.collectives.base import SingleRank
from services.executor.collectives.shared_memory import SharedMemory, make_area
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.ipc.flight_recorder import (
    LINES,
    PLANS,
    STEPS,
    Collective,
    CollectiveKind,
    FlightRecorder,
    RankRecord,
)
from services.executor.worker.diagnostics import RecordedStream
from services.executor.worker.rendezvous import RecordedCollectives
from shared.errors import RingLost
from shared.messages.debugging import PlanDump

BLOCK = 4


def plan_of(step: int, sequences: list[tuple[int, int]]) -> StepPlan:
    """`sequences`: (tokens of the step, tokens in the cache). Blocks are numbered through."""
    tokens = sum(count for count, _ in sequences)
    blocks = sum(-(-context // BLOCK) for _, context in sequences)
    ones = to_bytes([1] * tokens)
    return StepPlan(
        step=step,
        num_decodes=sum(1 for count, _ in sequences if count == 1),
        token_ids=ones,
        positions=ones,
        slots=ones,
        query_lens=to_bytes([count for count, _ in sequences]),
        context_lens=to_bytes([context for _, context in sequences]),
        block_tables=to_bytes(np.arange(blocks, dtype=np.int32)),
        sample_rows=to_bytes(list(range(len(sequences)))),
        saves=to_bytes([(1, 2)]),
    )


def test_the_last_steps_are_there_for_another_process(tmp_path: Path) -> None:
    board = tmp_path / "board"
    FlightRecorder.beside(board, 2, create=True)
    writer, reader = FlightRecorder.beside(board, 2).rank(1), FlightRecorder.beside(board, 2).read(1)
    assert reader.steps() == []
    for step in range(1, STEPS + 6):
        writer.begin_step(step)
        writer.sent()
        writer.computed()
        writer.end_step(step)
    writer.begin_step(STEPS + 6)
    assert [times.step for times in reader.steps()] == list(range(7, STEPS + 7))
    assert [times.step for times in reader.steps(3)] == [STEPS + 4, STEPS + 5, STEPS + 6]
    whole, under_way = reader.step(20), reader.step(STEPS + 6)
    assert under_way is not None
    assert 0 < whole.began <= whole.sent <= whole.computed <= whole.ended
    assert (under_way.sent, under_way.ended) == (0, 0)
    assert reader.step(1) is None, "it was overwritten"
    assert FlightRecorder.beside(board, 2).read(0).steps() == [], "rows are apart"


def test_collectives_from_python_are_written_down() -> None:
    class Failing(SingleRank):
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            seen = row.collective
            assert (seen.in_flight, seen.begun, seen.kind, seen.bytes) == (True, 2, CollectiveKind.ALL_REDUCE, 12)
            raise RingLost("a rank is gone")

    flight = FlightRecorder(Path("/nowhere/recorder"), 1)
    row = flight.read(0)
    collectives = RecordedCollectives(Failing(), flight.rank(0))
    collectives.barrier()
    assert (row.collective.in_flight, row.collective.begun, row.collective.kind) == (False, 1, CollectiveKind.BARRIER)
    with pytest.raises(RingLost):
        collectives.all_reduce(torch.zeros(3))
    assert row.collective.in_flight, "the ring was lost in it"


def test_native_collectives_write_themselves() -> None:
    """Alike on all ranks; whoever waits is seen to wait, and for what."""
    area = make_area(2, 1)
    flight = FlightRecorder(Path("/nowhere/recorder"), 2)
    rings = [SharedMemory(area, rank, 2) for rank in range(2)]
    for rank, ring in enumerate(rings):
        ring.show(flight.rank(rank).collective)

    def both(work: Callable[[SharedMemory], object]) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, rings))

    both(lambda ring: ring.all_reduce(torch.zeros(5)))
    both(lambda ring: ring.gather_to_leader(torch.zeros(2, 3), [3, 3]))
    for row in flight.read_all():
        assert (row.collective.begun, row.collective.finished, row.collective.kind) == (2, 2, CollectiveKind.GATHER)
        assert row.collective.bytes == 24
        assert 0 < row.collective.waited_ns <= row.collective.busy_ns
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rings[0].barrier)
        row = flight.read(0)
        while not row.collective.in_flight:
            assert not waiting.done()
        assert (row.collective.begun, row.collective.kind) == (3, CollectiveKind.BARRIER)
        assert flight.read(1).collective.begun == 2, "it has not come"
        rings[1].barrier()
        waiting.result(10)
    assert [row.collective.finished for row in flight.read_all()] == [3, 3]
    for ring in rings:
        ring.close()


@settings(max_examples=20)
@given(st.lists(st.text(max_size=200), max_size=2 * LINES))
def test_the_last_lines_of_a_log_are_kept(lines: list[str]) -> None:
    flight = FlightRecorder(Path("/nowhere/recorder"), 1)
    for line in lines:
        flight.rank(0).line(line)
    kept = [line.encode(errors="replace")[:480].decode(errors="replace") for line in lines[-LINES:]]
    assert flight.read(0).lines() == kept


def test_a_stream_hands_on_what_it_keeps(tmp_path: Path) -> None:
    flight = FlightRecorder(tmp_path / "recorder", 1)
    with (tmp_path / "log").open("w") as file:
        stream = RecordedStream(file, flight.rank(0))
        print("one\ntw", end="", file=stream)
        print("o\n\nthree", file=stream, flush=True)
    assert (tmp_path / "log").read_text() == "one\ntwo\n\nthree\n"
    assert flight.read(0).lines() == ["one", "two", "three"]


def test_an_excuse_lasts_until_it_is_taken_back() -> None:
    flight = FlightRecorder(Path("/nowhere/recorder"), 1)
    row: RankRecord = flight.read(0)
    flight.rank(0).excuse(1000)
    assert row.excused_until - row.collective.since > 999e9
    before = row.excused_until
    flight.rank(0).excuse(0)
    assert row.excused_until < before


# --- plans ---------------------------------------------------------------------------------------


def read(plans: list[StepPlan], ids: list[str]) -> list[PlanDump]:
    log = FlightRecorder(Path("/nowhere/recorder"), 1).plans
    for plan in plans:
        log.add(plan, ids, BLOCK)
        log.took(plan.step, 0.25)
    return log.read()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(9, 40)), max_size=20))
def test_a_plan_is_kept_without_its_tokens(sequences: list[tuple[int, int]]) -> None:
    ids = [f"generation-{number}" for number in range(len(sequences))]
    [record] = read([plan_of(7, sequences)], ids)
    assert (record.step, record.ms, record.saves, record.restores) == (7, 250.0, 1, 0)
    assert record.tokens == sum(count for count, _ in sequences)
    assert record.decodes == sum(1 for count, _ in sequences if count == 1)
    assert [(one.tokens, one.context) for one in record.sequences] == sequences
    assert [one.generation_id for one in record.sequences] == ids
    assert [block for one in record.sequences for block in one.blocks] == list(range(record.blocks))


def test_the_last_plans_are_kept_in_order() -> None:
    records = read([plan_of(step, [(1, step)]) for step in range(1, PLANS + 9)], ["a"])
    assert [record.step for record in records] == list(range(9, PLANS + 9))
    assert [one.context for record in records for one in record.sequences] == list(range(9, PLANS + 9))


def test_of_a_plan_that_is_too_large_there_is_how_much_it_was() -> None:
    sequences = [(1, 400)] * 300
    [record] = read([plan_of(1, sequences)], ["x" * 40] * 300)
    assert (record.sequence_count, record.blocks, record.tokens) == (300, 30_000, 300)
    assert len(record.sequences) < 300
    assert sum(len(one.blocks) for one in record.sequences) < 30_000


def test_what_native_collectives_write_to_is_kept_for_as_long_as_they_write() -> None:
    """They have an address alone: without a hold on it they write into what comes there next."""
    area = make_area(1, 1)
    ring = SharedMemory(area, 0, 1)
    memory = bytearray(8 * 64)
    ring.show(Collective.from_buffer(memory))
    gc.collect()
    with pytest.raises(BufferError):  # somebody holds it
        memory.clear()
    ring.close()
    memory.clear()


def test_what_a_plan_does_with_snapshots_is_kept() -> None:
    log = FlightRecorder(Path("/nowhere/recorder"), 1).plans
    plan = msgspec.structs.replace(
        plan_of(3, [(1, 9)]),
        state_snapshots=to_bytes([(0, 4)]),
        state_saves=to_bytes([5, 20, 21, 6, 22, 23]),
        state_loads=to_bytes([1, 24, 25]),
    )
    log.add(plan, ["a"], BLOCK, state_blocks=2)
    [record] = log.read()
    assert (record.snapshots, record.snapshot_saves, record.snapshot_loads) == (1, 2, 1)
