"""A ring of real ranks in this process, whose steps are cut as chance will have it; and what it says undisturbed."""

import queue
import random
import threading
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.collectives.shared_memory import SharedMemory, make_area
from services.executor.core.engine import EngineSpec, RestoreFailed, SampledToken
from services.executor.core.layer_state import choosing_pages, page_layers
from services.executor.core.sampling_state import SamplingState
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.kv_cache.block_memory import MappedFiles, file_system
from services.executor.kv_cache.codecs import Codec
from services.executor.kv_cache.offload import SpillStore
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import load_config, load_model
from services.executor.sampling.sampler import Sampler
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.scheduler.drafts.drafting import Drafter
from services.executor.scheduler.sequence import Sequence
from services.executor.scheduler.steps import SampledRow
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.catalog import backend_of
from services.executor.worker.launches import Launches
from services.executor.worker.runner import ModelRunner
from shared.errors import InternalError
from shared.messages import GenerationRequest, TokenLogprobs

CPU = torch.device("cpu")
SLOTS = 40  # spill slots in host memory
STATES = 6  # slots of recurrent state, where the model keeps any: of three sequences and some snapshots
DRAFT_STATES = 48  # further ones, for states behind drafts


def needs_disk(directory: Path) -> None:
    """Skips the test where `directory` is in memory."""
    if file_system(directory.stat().st_dev) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are in memory")


class Said(NamedTuple):
    """What a ring has said at one position of one answer."""

    token: int
    logits: str  # a digest of all of them
    logprobs: TokenLogprobs | None


class Cuts(NamedTuple):
    """How a ring's steps are cut."""

    num_quantized: int
    budget: int
    sequences: int
    drafts: int
    lookahead: bool
    spills: bool
    session_ttl: float
    # Of all else: how long drafts are and whether they are right, who is preempted, which step fails.
    seed: int


class Ranks:
    """Runners of one model, `world_size` of them, each with threads of its own."""

    def __init__(
        self,
        directory: Path,
        codecs: Seq[Codec | None],
        block_size: int,
        writable: int,
        quantized: int,
        world_size: int,
        *,
        summaries: bool = False,
        mapped: bool = False,
        in_groups: bool = True,
        threads: int = 2,
    ) -> None:
        """`mapped`: full blocks lie in files beside the model. `in_groups`: where their codes can. `threads`: of a
        ring of one."""
        config = load_config(directory)
        self.context, self.vocabulary = config.max_position_embeddings, config.vocab_size
        self.block_size, self.writable = block_size, writable
        self._plans: list[queue.Queue[StepPlan | None]] = []
        self.files: list[MappedFiles] = []
        self.stores: list[KvStore] = []
        self.threads = threads if world_size == 1 else 1  # those of several ranks wait for each other's cores
        area = make_area(world_size, self.threads) if world_size > 1 else None

        def runner(collectives: Collectives) -> ModelRunner:
            layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
            model = load_model(directory, torch.bfloat16, layout, collectives, CPU, lambda done, total: None)
            states = layer_states(config, layout)
            slot = tuple(state.slot for state in states if state.slot)
            choosing = choosing_pages(states)
            shape = StoreShape(
                block_size, torch.bfloat16, page_layers(states), tuple(codecs), slot, choosing, mapped, in_groups
            )
            shape = shape.with_summaries() if summaries else shape
            spill = SpillStore(SLOTS, 0, shape.bytes_per_spilled_block)
            files = MappedFiles(directory) if mapped else None
            store = KvStore(shape, writable, CPU, quantized, STATES + DRAFT_STATES if slot else 0, files=files)
            self.files += [] if files is None else [files]
            self.states, self.state_blocks = STATES if slot else 0, store.blocks_per_snapshot
            self.stores.append(store)
            made = backend_of(CPU).runner(RunnerRequest(model, store, layout, collectives, CPU, self.threads, spill))
            assert made.is_native
            return made

        def work(rank: int) -> None:
            assert area is not None
            own = runner(SharedMemory(area, rank, world_size, lanes=self.threads, timeout=60))
            while (plan := self._plans[rank - 1].get(timeout=120)) is not None:
                own.forward(plan)

        for rank in range(1, world_size):
            self._plans.append(queue.Queue())
            threading.Thread(target=work, args=(rank,), daemon=True).start()
        leader = SingleRank() if area is None else SharedMemory(area, 0, world_size, lanes=self.threads, timeout=60)
        self._leader = runner(leader)

    def forward(self, plan: StepPlan) -> Tensor:
        for plans in self._plans:
            plans.put(plan)
        logits = self._leader.forward(plan)
        assert isinstance(logits, Tensor)
        return logits

    def close(self) -> None:
        for plans in self._plans:
            plans.put(None)


class _KnowingDrafter(Drafter):
    """Proposes what was said undisturbed, or something else."""

    def __init__(
        self, spec: EngineSpec, settings: BatchSettings, rng: random.Random, said: dict[str, list[Said]]
    ) -> None:
        super().__init__(spec, settings, ())
        self._rng, self._said = rng, said

    def may_rest(self, sequences: Seq[Sequence]) -> bool:
        return self._rng.random() < 0.7

    def propose(self, sequences: Seq[Sequence], limits: Seq[int], budget: int) -> list[list[int]]:
        found = []
        for sequence, limit in zip(sequences, limits, strict=True):
            known = [one.token for one in self._said.get(sequence.request.generation_id, [])]
            count = self._rng.randint(0, max(0, min(limit, budget)))
            drafts = known[sequence.output_tokens :][:count]
            if drafts and self._rng.random() < 0.5:
                drafts[self._rng.randrange(len(drafts))] ^= 1
            budget -= len(drafts)
            found.append(drafts)
        return found


class ExactRing:
    """A batcher over `ranks`, whose every row of logits is held against what was `said` undisturbed."""

    def __init__(self, ranks: Ranks, cuts: Cuts, said: dict[str, list[Said]] | None = None) -> None:
        self._ranks, self._cuts, self._rng = ranks, cuts, random.Random(cuts.seed)
        self._expected = said
        self.said: dict[str, list[Said]] = {}
        self.compared = self.failed = 0
        spec = EngineSpec(
            ranks.block_size, ranks.writable, ranks.context, ranks.vocabulary, num_quantized=cuts.num_quantized,
            num_host=SLOTS if cuts.spills else 0, copies_per_step=4, num_states=ranks.states,
            draft_states=DRAFT_STATES if ranks.states else 0, state_blocks=ranks.state_blocks,
            sparse=["pages", "window"],
        )  # fmt: skip
        settings = BatchSettings(cuts.budget, cuts.sequences, session_ttl=cuts.session_ttl, max_drafts=cuts.drafts)
        drafter = _KnowingDrafter(spec, settings, self._rng, said) if cuts.drafts and said else None
        self.batcher = Scheduler(spec, settings, "m", drafter)
        self._launches = Launches(self._execute)
        self._rows: list[SampledRow] = []

    def run(self, requests: Iterable[GenerationRequest]) -> None:
        """Answers them all; they come one after the other, as chance will have it."""
        coming = list(requests)
        while coming or self.batcher.has_work:
            while coming and (not self.batcher.has_work or self._rng.random() < 0.3):
                assert self.batcher.add(coming.pop(0)) is None
            self._preempt()
            step = self.batcher.schedule()
            if step is not None:
                self._finish(step)
            self.batcher.check()

    def _preempt(self) -> None:
        running = self.batcher._planner.running
        if self._expected is not None and running and self._rng.random() < 0.05:
            self.batcher._planner.preempt(self._rng.choice(running))

    def _finish(self, step: tuple[StepPlan, list[SampledRow]]) -> None:
        steps = [step]
        while steps:
            if len(steps) == 1 and self._cuts.lookahead:
                later = self.batcher.schedule_ahead()
                steps += [] if later is None else [later]
            plan, rows = steps.pop(0)
            sampled = self._launch(plan, rows)
            if sampled is not None and (self._expected is None or self._rng.random() > 0.05):
                self.batcher.update(sampled)
                continue
            self.failed += 1
            for plan, rows in steps:  # it is executed all the same, and counts no more
                self._launch(plan, rows)
            steps = []
            if sampled is not None:
                self.batcher.fail_step(InternalError("as it happens"), set())

    def _launch(self, plan: StepPlan, rows: list[SampledRow]) -> list[SampledToken] | None:
        self._rows = rows
        try:
            return self._launches.launch(plan, [row.sampling for row in rows]).result()
        except RestoreFailed as error:
            self.batcher.fail_restores(error.slots)
            return None

    def _execute(self, plan: StepPlan, states: list[SamplingState]) -> list[SampledToken]:
        for files in self._ranks.files:
            if self._rng.random() < 0.1:
                files.drop()
        logits = self._ranks.forward(plan)
        found = Sampler().sample(logits, states)
        tokens, rows = as_int32(plan.token_ids), as_int32(plan.sample_rows).tolist()
        for row, at, one, of_row in zip(self._rows, rows, found, logits, strict=True):
            self._hear(row, tokens[at - row.ahead + 1 : at + 1].tolist(), one, of_row)
        return found

    def _hear(self, row: SampledRow, drafts: list[int], one: SampledToken, logits: Tensor) -> None:
        name, position = row.request.generation_id, row.sampling.position
        digest = blake2b(logits.contiguous().numpy().tobytes(), digest_size=8).hexdigest()
        said = Said(one.token, digest, one.logprobs)
        if self._expected is None:
            self.said.setdefault(name, []).append(said)
            return
        expected = self._expected[name]
        right = drafts == [one.token for one in expected[position - row.ahead : position]]
        if right and position < len(expected):  # what is planned behind an end counts for nothing
            assert said == expected[position], f"{name} says something else at {position}"
            self.compared += 1
