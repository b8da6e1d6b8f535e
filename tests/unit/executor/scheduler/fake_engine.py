"""A rank that executes plans on a model of its memory, and reads its answers out of it.

Each slot holds the (token, position, mark) that was last written there, where the mark stands for the
whole beginning that was read when the token was computed, as a real key does. Every read checks the
marks of the whole context. The next token of a sequence is a function of its seed, its output position
and everything that its block table leads to. So a wrong slot, a shared block that was overwritten, a
stale cache hit, or a copy that was made too late or to a wrong place changes the text or fails at once.
So does a block that is read in another form than its reader's position tells (docs/adr/0024).

Where the model keeps recurrent state each slot of that has (tokens taken in, the mark of these): a token goes in only
behind its own beginning, and a step moves its sequences' states on, be it that it fails then.
"""

from hashlib import blake2b
from typing import NamedTuple

from services.executor.core.engine import BadLogits, EngineSpec, RestoreFailed, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan, as_int32
from shared.messages import GenerationRequest

VOCAB = 50

Slot = tuple[int, int, int]  # (token, position, mark); in a block of a snapshot (~part, tokens, mark)
State = tuple[int, int]  # (tokens, mark) of a recurrent state


def next_token(content: list[int], seed: int, position: int, adapter: str = "") -> int:
    payload = repr((content, seed, position, adapter)).encode()
    return int.from_bytes(blake2b(payload, digest_size=4).digest(), "little") % VOCAB


def undisturbed(request: GenerationRequest, length: int) -> list[int]:
    """Output tokens up to `length` in all, as one ring alone would compute them."""
    output = list(request.generated)
    while len(output) < length and not (output and output[-1] in request.stop_token_ids):
        so_far = request.prompt + output
        output.append(next_token(so_far, request.sampling.seed, len(output), request.adapter))
    return output


def pairs(payload: bytes) -> list[tuple[int, int]]:
    values = as_int32(payload).tolist()
    return list(zip(values[::2], values[1::2], strict=True))


def lists(payload: bytes, length: int) -> list[list[int]]:
    """Lists of `length` numbers each."""
    return as_int32(payload).reshape(-1, length).tolist()


class FakeEngine:
    """Executes plans, and asserts that they are well formed."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.blocks: list[list[Slot | None]] = [[None] * spec.block_size for _ in range(spec.total_blocks)]
        self.spilled: dict[int, list[Slot | None]] = {}
        self.landing: dict[int, list[Slot | None]] = {}  # what another ring has given
        self.unreadable: set[int] = set()  # spill slots whose bytes have been lost since they were written
        self.bad_rows: set[int] = set()  # rows of the next step that are no numbers
        self.largest = 0
        self.saves = self.compressions = self.restores = 0  # copies in all
        self.parts = 1 + spec.state_blocks
        # By slot, the directory that was read into it: its adapter's digest.
        self.adapters = [""] * spec.max_adapters
        self.adapter_loads = 0
        self.states: list[State | None] = [None] * (spec.num_states + spec.draft_states)
        self.state_copies = self.state_saves = self.state_loads = 0

    def execute(self, plan: StepPlan, states: list[SamplingState]) -> list[SampledToken]:
        self._load_adapters(plan)
        self._copy(plan)
        tokens, positions, slots = (
            as_int32(payload).tolist() for payload in (plan.token_ids, plan.positions, plan.slots)
        )
        lengths = as_int32(plan.query_lens).tolist()
        assert len(tokens) == len(positions) == len(slots) == sum(lengths)
        assert len(set(slots)) == len(slots), "two tokens go to one slot"
        assert all(slot < self.spec.num_blocks * self.block_size for slot in slots), "a quantized block is written"
        assert lengths == sorted(lengths, key=lambda length: length > 1), "single tokens do not come first"
        assert plan.num_decodes == lengths.count(1)
        self.largest = max(self.largest, len(tokens))
        found = self._compute(plan, lengths, states)
        if bad := sorted(self.bad_rows):
            self.bad_rows = set()
            raise BadLogits(bad)
        return found

    def _load_adapters(self, plan: StepPlan) -> None:
        """Also of a step that fails."""
        assert len({slot for slot, _ in plan.adapter_loads}) == len(plan.adapter_loads)
        for slot, directory in plan.adapter_loads:
            self.adapters[slot] = directory
            self.adapter_loads += 1

    # --- copies ----------------------------------------------------------------------------------

    def _copy(self, plan: StepPlan) -> None:
        saves, adoptions, restores = pairs(plan.saves), pairs(plan.adoptions), pairs(plan.restores)
        kept = [(slot, at) for slot, *blocks in lists(plan.state_saves, self.parts) for at in blocks]
        self._check_targets(saves, pairs(plan.compressions) + adoptions + kept, restores)
        self.save(plan)
        self._save_states(plan)
        for slot, block in adoptions:
            self.blocks[block] = list(self.landing.pop(slot))
        for slot, block in restores:
            self.blocks[block] = list(self.spilled[slot])
        self.saves, self.restores = self.saves + len(saves), self.restores + len(restores)
        failed = [slot for slot, _ in restores if slot in self.unreadable]
        if failed:
            for slot, block in restores:
                if slot in failed:
                    self._wipe(block)
            raise RestoreFailed(failed)
        self._load_states(plan)

    def save(self, plan: StepPlan) -> None:
        """What is evicted; of a round of a draft model too."""
        saves = pairs(plan.saves)
        for block, slot in saves:
            assert None not in self.blocks[block], "a block is saved that is not full"
            self.spilled[slot] = list(self.blocks[block])
            self.unreadable.discard(slot)
        for block in {block for block, _ in saves}:
            self._wipe(block)

    def _save_states(self, plan: StepPlan) -> None:
        for slot, *blocks in lists(plan.state_saves, self.parts):
            state = self.states[slot]
            assert state is not None, "a state is saved that is none"
            for part, block in enumerate(blocks):
                self.blocks[block] = [(~part, *state)] * self.block_size
            self.states[slot] = None
            self.state_saves += 1

    def _load_states(self, plan: StepPlan) -> None:
        for slot, *blocks in lists(plan.state_loads, self.parts):
            parts = [self.at(block, 0) for block in blocks]
            assert [part for part, _, _ in parts] == [~part for part in range(len(blocks))]
            (state,) = {part[1:] for part in parts}
            self.states[slot] = state
            self.state_loads += 1

    def _compress(self, plan: StepPlan) -> None:
        """In the step, behind its writes."""
        for writable, quantized in pairs(plan.compressions):
            assert writable < self.spec.num_blocks <= quantized
            assert None not in self.blocks[writable], "a block is compressed that is not full"
            self.blocks[quantized] = list(self.blocks[writable])
            self.compressions += 1

    def _check_targets(self, *copies: list[tuple[int, int]]) -> None:
        saves, compressions, restores = copies
        assert len(restores) <= self.spec.copies_per_step
        assert len({slot for _, slot in saves}) == len(saves), "two blocks are saved to one slot"
        written = [quantized for _, quantized in compressions] + [block for _, block in restores]
        assert len(set(written)) == len(written), "a block is written by two copies"
        for slot in (*(slot for _, slot in saves), *(slot for slot, _ in restores)):
            assert 0 <= slot < self.spec.num_host + self.spec.num_disk

    def _wipe(self, block: int) -> None:
        """Whoever reads the block before it is written again is wrong."""
        self.blocks[block] = [None] * self.block_size

    # --- forward pass ----------------------------------------------------------------------------

    def _compute(self, plan: StepPlan, lengths: list[int], states: list[SamplingState]) -> list[SampledToken]:
        contexts, rows = as_int32(plan.context_lens).tolist(), as_int32(plan.sample_rows).tolist()
        flat, results, row, waiting = as_int32(plan.block_tables).tolist(), [], 0, list(states)
        chunks = []
        slots = as_int32(plan.adapters).tolist() or [-1] * len(lengths)
        for length, context, slot in zip(lengths, contexts, slots, strict=True):
            table = [flat.pop(0) for _ in range(-(-context // self.block_size))]
            adapter = self.adapters[slot] if slot >= 0 else ""
            assert adapter or slot < 0, "an adapter is used that was not loaded"
            chunks.append(self._write(plan, table, range(row, row + length), context, adapter))
            row += length
        assert not flat
        self._check_writers(chunks)
        self._compress(plan)
        self._move_on(plan, chunks)
        row = 0
        for chunk in chunks:
            content = chunk.read(self)
            for seen in range(chunk.begin + 1, chunk.context + 1):
                if row in rows:
                    results.append(self.sample(content[:seen], waiting.pop(0), chunk.adapter))
                row += 1
        assert not waiting
        assert len(results) == len(rows)
        return results

    def _move_on(self, plan: StepPlan, chunks: "list[Chunk]") -> None:
        """The recurrent states, each by its sequence's tokens."""
        slots = as_int32(plan.state_slots).tolist()
        assert len(slots) == len(set(slots)) == (len(chunks) if self.spec.num_states else 0)
        tokens, wanted, row = as_int32(plan.token_ids).tolist(), pairs(plan.state_snapshots), 0
        targets = {slot for _, slot in wanted}
        assert not targets & set(slots), "a state is copied to a slot in use"
        assert len(targets) == len(wanted), "two states are copied to one slot"
        for slot, chunk in zip(slots, chunks, strict=False):
            state = self.states[slot] if chunk.begin else (0, chunk.mark)
            for position in range(chunk.begin, chunk.context):
                before = chunk.written(self, position - 1)[2] if position else chunk.mark
                assert state == (position, before), "a state is not that of the tokens before"
                state = position + 1, hash((before, tokens[row]))
                for copy in [copy for at, copy in wanted if at == row]:
                    self._copy_state(copy, state, last=position + 1 == chunk.context)
                row += 1
            self.states[slot] = state
        assert all(0 <= at < row for at, _ in wanted), "a state of a row that is not there is copied"

    def _copy_state(self, to: int, state: State, *, last: bool) -> None:
        """For a snapshot, behind a full block, or before a draft, in the middle of a sequence's rows."""
        is_snapshot = state[0] % self.block_size == 0
        assert is_snapshot or not last, "a state is copied that nobody needs"
        self.states[to] = state
        self.state_copies += 1

    def sample(self, content: list[int], state: SamplingState, adapter: str = "") -> SampledToken:
        """The token after `content`."""
        return SampledToken(next_token(content, state.params.seed, state.position, adapter))

    def _write(self, plan: StepPlan, table: list[int], rows: range, context: int, adapter: str = "") -> "Chunk":
        tokens, positions, slots = (
            as_int32(payload)[rows.start : rows.stop].tolist()
            for payload in (plan.token_ids, plan.positions, plan.slots)
        )
        assert positions == list(range(context - len(rows), context)), "not the context's last tokens"
        kept = dict(pairs(plan.compressions))
        chunk = Chunk(table, {}, positions[0], context, adapter)
        for token, position, slot in zip(tokens, positions, slots, strict=True):
            at = position // self.block_size
            block, offset = divmod(slot, self.block_size)
            assert offset == position % self.block_size
            # The last block is read as it is written, the others that the step fills as it compresses them.
            read_from = block if at == len(table) - 1 else kept.get(block, block)
            assert read_from == table[at], "what is written is not what later positions read"
            chunk.own[at] = block
            before = chunk.written(self, position - 1)[2] if position else chunk.mark
            self.blocks[block][offset] = (token, position, hash((before, token)))
        return chunk

    def _check_writers(self, chunks: "list[Chunk]") -> None:
        for chunk in chunks:
            for other in chunks:
                assert other is chunk or not set(chunk.own.values()) & {*other.table, *other.own.values()}, (
                    "a block is written that another reads"
                )

    def at(self, block: int, offset: int) -> Slot:
        stored = self.blocks[block][offset]
        assert stored is not None, "a slot is read that was not written, or whose content has moved"
        return stored


class Chunk(NamedTuple):
    """What a step computes of one sequence: the positions [begin, context)."""

    table: list[int]
    own: dict[int, int]  # the blocks that are written to, by their places in the table
    begin: int
    context: int
    adapter: str = ""

    @property
    def mark(self) -> int:
        """Before its first token: what one adapter has computed is no other's."""
        return hash(self.adapter) if self.adapter else 0

    def written(self, engine: FakeEngine, position: int) -> Slot:
        """What is at `position`, before the step has compressed anything."""
        at, offset = divmod(position, engine.block_size)
        return engine.at(self.own.get(at, self.table[at]), offset)

    def read(self, engine: FakeEngine) -> list[int]:
        """The tokens of the whole context, as each position that is computed reads it."""
        content: list[int] = []
        for reader in range(self.begin, self.context):
            home = reader // engine.block_size
            content, mark = [], self.mark
            for position in range(reader + 1):
                at, offset = divmod(position, engine.block_size)
                block = self.own[at] if at == home else self.table[at]
                quantized = block >= engine.spec.num_blocks
                assert quantized == (at < home and engine.spec.num_quantized > 0), "a block is read in the wrong form"
                token, written_at, stored = engine.at(block, offset)
                mark = hash((mark, token))
                assert written_at == position, "a slot holds another position's token"
                assert stored == mark, "a slot holds what was computed after another beginning"
                content.append(token)
        return content
