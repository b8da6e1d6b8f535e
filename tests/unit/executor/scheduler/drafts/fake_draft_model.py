"""A draft model's memory beside the fake engine's: what it has computed, and what it reads when it proposes.

It is copied as the other one is, and may hold nothing where steps were not followed: that lowers acceptance only. But
what a sequence has not sealed yet is the draft model's own work: in the block of the first row of a round, each slot
must hold the token that the model that is served has there.
"""

import random

from services.executor.core.engine import DraftPlan, DraftToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan, as_int32
from tests.unit.executor.scheduler.fake_engine import VOCAB, FakeEngine, next_token, pairs

Slot = tuple[int, int]  # (token, position)


class FakeDraftModel:
    """Executes rounds, and asserts that they are well formed."""

    def __init__(self, engine: FakeEngine, rng: random.Random, right: float = 0.7) -> None:
        self._engine, self._rng, self._right = engine, rng, right
        self._size = engine.block_size
        empty: list[Slot | None] = [None] * self._size
        self._blocks = [list(empty) for _ in range(engine.spec.total_blocks)]
        self._spilled: dict[int, list[Slot | None]] = {}
        # Rounds; their rows before the last token of a sequence; rows of steps; slots that were read and hold nothing
        # of use.
        self.rounds = self.catching_up = self.followed = self.gaps = 0

    # --- beside the steps of the engine ----------------------------------------------------------

    def copy(self, plan: StepPlan) -> None:
        """What a plan copies, before it computes. Not what other rings give: nobody knows whether they drafted."""
        for block, slot in pairs(plan.saves):
            self._spilled[slot] = list(self._blocks[block])
        for slot, block in pairs(plan.restores):
            if slot in self._spilled:
                self._blocks[block] = list(self._spilled[slot])

    def step(self, plan: StepPlan) -> None:
        """Computes the rows of a step that is followed; full blocks are compressed with the engine's."""
        assert not plan.of_draft
        if plan.followed:
            tokens, positions, slots = (as_int32(x).tolist() for x in (plan.token_ids, plan.positions, plan.slots))
            assert min(tokens) >= 0, "a step that was planned ahead is followed"
            for token, position, slot in zip(tokens, positions, slots, strict=True):
                self._write(slot, token, position)
            self.followed += len(tokens)
        for writable, quantized in pairs(plan.compressions):
            self._blocks[quantized] = list(self._blocks[writable])

    # --- rounds ----------------------------------------------------------------------------------

    def draft(self, plan: DraftPlan, samples: list[SamplingState]) -> list[list[DraftToken]]:
        first = plan.plan
        assert first.of_draft
        assert plan.count >= 1
        assert not first.restores + first.adoptions + first.compressions + first.handover
        self._engine.save(first)
        self.copy(first)
        lengths = as_int32(first.query_lens).tolist()
        assert lengths == sorted(lengths, key=lambda length: length > 1)
        assert first.num_decodes == lengths.count(1)
        ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
        assert as_int32(first.sample_rows).tolist() == [end - 1 for end in ends]
        behind = as_int32(plan.slots).reshape(len(lengths), plan.count - 1).tolist()
        written = [*as_int32(first.slots).tolist(), *(slot for row in behind for slot in row)]
        assert len(set(written)) == len(written), "two tokens go to one slot"
        assert max(written) < self._engine.spec.num_blocks * self._size, "a quantized block is written"
        self._check_writers(first, lengths, written)
        self.rounds += 1
        self.catching_up += sum(lengths) - len(lengths)
        return [
            self._propose(plan, end - length, end, row, state)
            for length, end, row, state in zip(lengths, ends, behind, samples, strict=True)
        ]

    def _check_writers(self, first: StepPlan, lengths: list[int], written: list[int]) -> None:
        tables = self._tables(first)
        assert len(tables) == len(lengths)
        held = [block for table in tables for block in set(table)]
        for slot in written:
            assert held.count(slot // self._size) == 1, "a block is written that another reads"

    def _tables(self, first: StepPlan) -> list[list[int]]:
        flat, found = as_int32(first.block_tables).tolist(), []
        for context in as_int32(first.context_lens).tolist():
            blocks = -(-context // self._size)
            found.append(flat[:blocks])
            del flat[:blocks]
        assert not flat
        return found

    def _propose(
        self, plan: DraftPlan, row: int, end: int, behind: list[int], state: SamplingState
    ) -> list[DraftToken]:
        """`row`, `end`: the sequence's rows of the first pass; `behind`: where its proposals go."""
        at = as_int32(plan.plan.sample_rows).tolist().index(end - 1)
        table = self._tables(plan.plan)[at]
        tokens, positions, slots = (
            as_int32(x)[row:end].tolist() for x in (plan.plan.token_ids, plan.plan.positions, plan.plan.slots)
        )
        last = positions[-1]
        assert positions == list(range(positions[0], last + 1))
        assert as_int32(plan.plan.context_lens).tolist()[at] == last + 1 + plan.count
        assert [*slots, *behind] == [self._slot(table, p) for p in range(positions[0], last + plan.count)]
        for token, position, slot in zip(tokens, positions, slots, strict=True):
            self._write(slot, token, position)
        content = [self._engine.at(table[p // self._size], p % self._size)[0] for p in range(last)]
        content.append(tokens[-1])
        assert content[positions[0] :] == tokens, "not the tokens of the model that is served"
        drafted: list[DraftToken] = []
        for ahead in range(plan.count):
            self._read(table, content, positions[0])
            content.append(self._token(content, state, ahead))
            drafted.append(DraftToken(content[-1], self._rng.random()))
            if ahead < len(behind):
                self._write(behind[ahead], content[-1], len(content) - 1)
        return drafted

    def _token(self, content: list[int], state: SamplingState, ahead: int) -> int:
        if self._rng.random() >= self._right:
            return self._rng.randrange(VOCAB)
        return next_token(content, state.params.seed, state.position + ahead)

    def _read(self, table: list[int], content: list[int], first: int) -> None:
        own = first // self._size * self._size
        for position, token in enumerate(content):
            block, offset = table[position // self._size], position % self._size
            known = self._blocks[block][offset] == (token, position)
            assert known or position < own, "the draft model has not computed what it should have"
            self.gaps += not known

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self._size] * self._size + position % self._size

    def _write(self, slot: int, token: int, position: int) -> None:
        block, offset = divmod(slot, self._size)
        assert offset == position % self._size
        self._blocks[block][offset] = (token, position)
