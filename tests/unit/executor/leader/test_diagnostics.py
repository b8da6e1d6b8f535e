"""What a leader tells is what its batcher has: every block and every request once, and no token."""

import msgspec
import pytest

from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.leader.diagnostics import describe
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from shared.messages import GenerationRequest

SPEC = EngineSpec(4, 16, 256, 100, num_quantized=24, num_host=8)
PROMPT = [71, 72, 73, 74, 75, 76]


def batcher() -> Scheduler:
    return Scheduler(SPEC, BatchSettings(max_batch_tokens=16, max_sequences=2, session_ttl=60.0))


def request(name: str, lane: str = "interactive") -> GenerationRequest:
    return GenerationRequest(name, f"r-{name}", "m", "c", [ord(name) - 30, *PROMPT], 3, lane=lane, session=name)  # type: ignore[arg-type]


def test_queues_and_blocks_are_told_while_a_step_is_under_way() -> None:
    ring = batcher()
    for name in ("a", "b", "c"):
        at = 2.0 if name == "a" else 5.0
        assert ring.add(request(name, "batch" if name == "c" else "interactive"), at) is None
    scheduled = ring.schedule(1.0)
    assert scheduled is not None
    assert [sequence.request.generation_id for sequence in ring.sequences_under_way()] == ["a", "b"]
    told = describe(ring, 5.0, by_loop=True)
    assert [(one.generation_id, one.state, one.in_step, one.age) for one in told.queues] == [
        ("a", "running", True, 3.0),
        ("b", "running", True, 0.0),
        ("c", "waiting", False, 0.0),
    ]
    assert (told.counts["running"], told.counts["waiting batch"]) == (2, 1)
    assert told.allocator.invariants == "hold"
    assert "71" not in msgspec.json.encode(told).decode(), "no token of a prompt"


def test_every_block_is_counted_once() -> None:
    ring = batcher()
    for name in ("a", "b"):
        ring.add(request(name))
    while ring.has_work:
        scheduled = ring.schedule(1.0)
        assert scheduled is not None
        blocks = describe(ring, 0.0, by_loop=True).allocator
        for pool, total in ((blocks.writable, 16), (blocks.quantized, 24)):
            assert pool.empty + pool.cached + pool.pinned + pool.used == pool.total == total
        assert sum(one.blocks for one in blocks.holders if one.kind == "sequence") >= blocks.private
        assert (blocks.host_slots, blocks.disk_slots) == (8, 0)
        ring.update([SampledToken(5)] * len(scheduled[1]))
    after = describe(ring, 0.0, by_loop=True).allocator
    assert after.sessions == sum(1 for one in after.holders if one.kind == "session") > 0
    assert after.writable.used == after.quantized.used == 0


def test_a_broken_invariant_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = batcher()
    ring.add(request("a"))
    ring.schedule(1.0)
    ring.sequences_under_way()[0].table.append(3)
    assert describe(ring, 0.0, by_loop=False).allocator.invariants.startswith("broken: tables hold")


def test_slots_and_snapshots_are_told_with_their_sequences() -> None:
    spec = msgspec.structs.replace(SPEC, num_states=3, state_blocks=2, layers="2 recurrent, 1 full")
    ring = Scheduler(spec, BatchSettings(max_batch_tokens=16, max_sequences=2))
    for name in ("a", "b", "c"):
        ring.add(request(name))
    slots = set()
    while ring.has_work:
        scheduled = ring.schedule(1.0)
        assert scheduled is not None
        told = describe(ring, 5.0, by_loop=True)
        running = {one.generation_id: one.slot for one in told.queues if one.state == "running"}
        assert all(slot >= 0 for slot in running.values())
        assert len(set(running.values())) == len(running) <= 2
        assert all(one.slot == -1 for one in told.queues if one.state == "waiting")
        slots |= set(running.values())
        ring.update([SampledToken(5)] * len(scheduled[1]))
    assert slots == {0, 1}
    after = describe(ring, 0.0, by_loop=True).allocator
    assert (after.state_slots, after.state_slots_used, after.snapshot_blocks) == (3, 0, 2)
    assert after.snapshots
    assert after.layers == "2 recurrent, 1 full"
