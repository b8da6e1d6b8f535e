"""What a leader tells whoever looks into its ring: queues and KV blocks, never a prompt or a token."""

from services.executor.engine.batching import ContinuousBatcher
from services.executor.engine.sequence import Sequence
from services.executor.engine.views import BatcherView
from shared.messages.debugging import AllocatorDump, HolderDump, LeaderDump, PoolDump, QueuedDump

MOST_QUEUED = 256
"""Requests that are listed; `counts` has all."""
MOST_HOLDERS = 10


def describe(batcher: ContinuousBatcher, now: float, by_loop: bool) -> LeaderDump:
    """`now`: of the clock by which the batcher takes requests on."""
    view = batcher.look()
    counts: dict[str, int] = {}
    for sequence in view.sequences:
        for key in (sequence.state.value, f"{sequence.state.value} {sequence.request.lane}"):
            counts[key] = counts.get(key, 0) + 1
    listed = [_queued(sequence, now) for sequence in view.sequences[:MOST_QUEUED]]
    return LeaderDump(listed, counts, _allocator(view, _invariants(batcher)), by_loop)


def _queued(sequence: Sequence, now: float) -> QueuedDump:
    request = sequence.request
    return QueuedDump(
        generation_id=request.generation_id,
        request_id=request.request_id,
        state=sequence.state.value,
        lane=request.lane,
        attempt=request.attempt,
        age=round(now - sequence.times.accepted, 3),
        prompt_tokens=sequence.prompt_tokens,
        output_tokens=sequence.output_tokens,
        computed=sequence.num_computed,
        blocks=sequence.blocks,
        session=bool(request.session),
        in_step=sequence.in_flight,
        restoring=len(sequence.restoring),
    )


def _allocator(view: BatcherView, invariants: str) -> AllocatorDump:
    blocks = view.blocks
    holders = [HolderDump("sequence", s.request.generation_id, s.blocks) for s in view.sequences if s.blocks]
    holders += [HolderDump("session", name, count) for name, count in blocks.pinned_for.items()]
    holders.sort(key=lambda holder: -holder.blocks)
    return AllocatorDump(
        block_size=view.spec.block_size,
        hot=PoolDump(*blocks.hot),
        cold=PoolDump(*blocks.cold),
        private=blocks.private,
        shared=blocks.shared,
        promised=view.promised,
        reserve=view.reserve,
        host_slots=blocks.host[0],
        host_used=blocks.host[1],
        disk_slots=blocks.disk[0],
        disk_used=blocks.disk[1],
        sessions=len(blocks.pinned_for),
        holders=holders[:MOST_HOLDERS],
        invariants=invariants,
    )


def _invariants(batcher: ContinuousBatcher) -> str:
    try:
        batcher.check()
    except AssertionError as broken:
        return f"broken: {broken}"
    return "hold"
