"""A ring of real ranks with a draft model, in threads of one process, and one sequence that is generated on it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from msgspec import structs

from services.executor.core.engine import DraftPlan, DraftToken, EngineSpec
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.ipc.board import RingBoard
from services.executor.ipc.rank_pipe import RankSpec, Rendezvous
from services.executor.worker.engine import RingEngine, follow_ring
from shared.config import load_settings
from shared.messages import SamplingParams

BLOCK = 8
CONTEXT = 96
MOST = 4  # drafts of a step


class Ring:
    def __init__(self, engine: RingEngine, spec: EngineSpec) -> None:
        self.engine, self.spec = engine, spec
        # Free slots of recurrent state, of a model that keeps any.
        self.states = list(range(spec.num_states + spec.draft_states))


@contextmanager
def ring_of(directory: Path, model: Path, draft: Path | str = "", tp: int = 1, **changes: object) -> Iterator[Ring]:
    """`directory` is made where there is none; `changes`: of the settings."""
    directory.mkdir(exist_ok=True)
    settings = load_settings(
        ExecutorSettings,
        **{
            "model": str(model),
            "draft_model": str(draft),
            "tp": tp,
            "device": "cpu",
            "threads": 1,
            "block_size": BLOCK,
            "context_length": CONTEXT,
            "max_sequences": 4,
            "kv_dtype": "bf16",
            "kv_memory": 4 << 20,
            "weight_cache_bytes": 0,
            "model_cache": str(directory / "models"),
            **changes,
        },
    )
    board = RingBoard(directory / "board", tp, create=True)
    followers: list[threading.Thread] = []

    def spec_of(rank: int) -> RankSpec:
        return RankSpec(rank, tp, "g", "i", 1, str(directory / "board"), {})

    def follow(rank: int, rendezvous: Rendezvous) -> None:
        follow_ring(settings, spec_of(rank), board, rendezvous)

    def announce(rendezvous: Rendezvous) -> None:
        for rank in range(1, tp):
            followers.append(threading.Thread(target=follow, args=(rank, rendezvous), daemon=True))
            followers[-1].start()

    engine = RingEngine(settings, spec_of(0), board, announce)
    try:
        yield Ring(engine, engine.load(lambda done, total: None))
    finally:
        engine.close()
        for follower in followers:
            follower.join(60)
            assert not follower.is_alive()


class Generated:
    """A sequence in blocks of its own, one after the other from `first_block`."""

    def __init__(
        self, ring: Ring, prompt: list[int], sampling: SamplingParams, first_block: int = 0, *, rewrites: bool = False
    ) -> None:
        """`rewrites`: what the draft model has computed behind its own proposals it computes again."""
        self.tokens = list(prompt)
        # The tokens of each, and what was proposed behind them.
        self.rounds: list[tuple[list[int], list[DraftToken]]] = []
        self._rewrites = rewrites
        self.state = SamplingState(sampling, prompt, [])
        self.accepted = self.proposed = 0
        self.proposals: list[DraftToken] = []
        self._ring, self._first, self._prompt = ring, first_block, len(prompt)
        self._computed = self._known = 0  # tokens that the model and its draft model have computed
        # Slots of its recurrent state, if any: where it is, and those for states behind drafts.
        self._states = [ring.states.pop() for _ in range(MOST + 1 if ring.states else 0)]

    @property
    def text(self) -> list[int]:
        return self.tokens[self._prompt :]

    def run(self, length: int, drafts: int = 0, chunk: int = 5, followed: bool = True) -> "Generated":
        """Until `length` tokens were put out; with `drafts` proposals of the draft model in each step. `followed`: by
        the draft model; else it computes in its first pass what it has not computed yet."""
        while len(self.tokens) - self._computed > 1:
            end = min(self._computed + chunk, len(self.tokens))
            plan = self._plan(self._computed, end, self.tokens, followed)
            last = self._ring.engine.execute(plan, [self.state])
            self._computed = end
        self._known = self._computed if followed else 0
        self._take(last[-1].token)
        while len(self.text) < length:
            self._step(min(drafts, length - len(self.text) - 1), followed)
        return self

    def _step(self, drafts: int, followed: bool) -> None:
        found = self._draft(drafts) if drafts else []
        self.proposals += found
        ahead = [token.token for token in found]
        states = [self.state, *self.state.after_each(ahead)]
        begin = self._computed
        plan = self._plan(begin, begin + 1 + drafts, self.tokens + ahead, followed, every=True)
        if self._states:
            behind = list(enumerate(self._states[1 : 1 + drafts]))
            plan = structs.replace(plan, state_snapshots=to_bytes(behind))
        drawn = [one.token for one in self._ring.engine.execute(plan, states)]
        self.proposed += drafts
        for at, token in enumerate(drawn):
            self._computed += 1
            self._take(token)
            if at == drafts or token != ahead[at]:
                break
            self.accepted += 1
        right = self._computed - begin - 1
        if self._states and right < drafts:
            self._states[0], self._states[1 + right] = self._states[1 + right], self._states[0]
        self._known = self._computed if followed else min(begin + max(drafts, 1), self._computed)
        if self._rewrites:
            self._known = min(self._known, begin + 1)

    def _take(self, token: int) -> None:
        self.tokens.append(token)
        self.state.advance(token)

    def _draft(self, count: int) -> list[DraftToken]:
        begin, end = self._known, self._computed + 1
        first = self._plan(begin, end, self.tokens, followed=False)
        plan = structs.replace(
            first,
            step=2,
            context_lens=to_bytes([end + count]),
            block_tables=to_bytes(self._table(end + count)),
            of_draft=True,
        )
        slots = [self._slot(position) for position in range(end, end + count - 1)]
        position = self.state.position
        [found] = self._ring.engine.draft(DraftPlan(plan, count, to_bytes(slots)), [self.state])
        assert self.state.position == position
        self.rounds.append((list(self.tokens), found))
        return found

    def _plan(self, begin: int, end: int, tokens: list[int], followed: bool, every: bool = False) -> StepPlan:
        count = end - begin
        return StepPlan(
            step=1,
            num_decodes=int(count == 1),
            token_ids=to_bytes(tokens[begin:end]),
            positions=to_bytes(np.arange(begin, end)),
            slots=to_bytes([self._slot(position) for position in range(begin, end)]),
            query_lens=to_bytes([count]),
            context_lens=to_bytes([end]),
            block_tables=to_bytes(self._table(end)),
            sample_rows=to_bytes(np.arange(count) if every else [count - 1]),
            followed=followed,
            state_slots=to_bytes(self._states[:1]),
        )

    def _slot(self, position: int) -> int:
        return self._first * BLOCK + position

    def _table(self, context: int) -> list[int]:
        return [self._first + at for at in range(-(-context // BLOCK))]
