"""An engine that reads its answers out of a simulated KV cache.

Each slot holds the (token, position) that was last written there. The next token of a sequence is a
function of its seed, its output position and everything that its block table leads to: a wrong
slot, a shared block that was overwritten or a stale cache hit changes the text.
"""

from hashlib import blake2b

from services.executor.engine.plan import StepPlan, as_int32
from services.executor.engine.protocol import SampledToken
from services.executor.engine.sampling_state import SamplingState
from shared.messages import GenerationRequest

VOCAB = 50


def next_token(content: list[int], seed: int, position: int) -> int:
    payload = repr((content, seed, position)).encode()
    return int.from_bytes(blake2b(payload, digest_size=4).digest(), "little") % VOCAB


def undisturbed(request: GenerationRequest, length: int) -> list[int]:
    """Output tokens up to `length` in all, as one ring alone would compute them."""
    output = list(request.generated)
    while len(output) < length and not (output and output[-1] in request.stop_token_ids):
        output.append(next_token(request.prompt + output, request.sampling.seed, len(output)))
    return output


class FakeEngine:
    """Executes plans, and asserts that they are well formed."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.largest = 0

    def execute(self, plan: StepPlan, states: list[SamplingState]) -> list[SampledToken]:
        tokens, positions, slots = (
            as_int32(payload).tolist() for payload in (plan.token_ids, plan.positions, plan.slots)
        )
        lengths = as_int32(plan.query_lens).tolist()
        assert len(tokens) == len(positions) == len(slots) == sum(lengths)
        assert len(set(slots)) == len(slots), "two tokens go to one slot"
        assert lengths == sorted(lengths, key=lambda length: length > 1), "single tokens do not come first"
        assert plan.num_decodes == lengths.count(1)
        self.largest = max(self.largest, len(tokens))
        for token, position, slot in zip(tokens, positions, slots, strict=True):
            self.slots[slot] = (token, position)
        return self._sample(plan, lengths, states)

    def _sample(self, plan: StepPlan, lengths: list[int], states: list[SamplingState]) -> list[SampledToken]:
        contexts, rows = as_int32(plan.context_lens).tolist(), as_int32(plan.sample_rows).tolist()
        table, results, row, waiting = as_int32(plan.block_tables).tolist(), [], 0, list(states)
        for length, context in zip(lengths, contexts, strict=True):
            row += length
            blocks = [table.pop(0) for _ in range(-(-context // self.block_size))]
            content = self._read(blocks, context)
            if row - 1 in rows:
                state = waiting.pop(0)
                results.append(SampledToken(next_token(content, state.params.seed, state.position)))
        assert not table
        assert not waiting
        assert len(results) == len(rows)
        return results

    def _read(self, blocks: list[int], context: int) -> list[int]:
        content = []
        for position in range(context):
            block, offset = divmod(position, self.block_size)
            stored = self.slots[blocks[block] * self.block_size + offset]
            assert stored is not None, "a slot is read that was never written"
            token, written_at = stored
            assert written_at == position, "a slot holds another position's token"
            content.append(token)
        return content
