"""A real model with recurrent layers says what it says undisturbed: whoever is preempted, fails, or begins with what
another has left."""

import queue
import random
from pathlib import Path

import pytest
import torch

from services.executor.collectives.base import Collectives
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepPlan, as_int32
from services.executor.kv_cache.capacity import store_shape
from services.executor.kv_cache.offload import SpillStore
from services.executor.kv_cache.store import KvStore
from services.executor.model.layer_states import layer_states
from services.executor.model.loading.loader import load_config, load_model
from services.executor.sampling.sampler import Sampler
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.worker.launches import Launches
from services.executor.worker.runner import ModelRunner, widths_of
from shared.errors import InternalError
from shared.messages import GenerationRequest, SamplingParams, TokenEntry
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, on_ring
from tests.unit.executor.model.tiny import build

OTHERS = (
    "bailing_hybrid",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm3",
    "mamba",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "zamba",
    "zaya",
)
WRITABLE, QUANTIZED, SLOTS, SPILLED = 24, 60, 5, 80
OUTPUT = 10


def make_runner(directory: Path, collectives: Collectives) -> tuple[ModelRunner, KvStore]:
    config = load_config(directory)
    layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
    model = load_model(directory, torch.float32, layout, collectives, CPU, lambda done, total: None)
    states = layer_states(config, layout)
    shape = store_shape(ExecutorSettings(block_size=BLOCK_SIZE), "bf16", states, torch.float32)
    more = 4 * shape.blocks_per_snapshot
    store = KvStore(shape, WRITABLE, CPU, QUANTIZED + more, num_slots=SLOTS)
    spill = SpillStore(SPILLED + more, 0, shape.bytes_per_spilled_block)
    return ModelRunner(model, widths_of(model), store, collectives, CPU, spill), store


def requests(turn: str) -> list[GenerationRequest]:
    prompts = {"a": range(22), "b": range(22), "c": range(40, 57)}
    greedy = SamplingParams(temperature=0.0)
    return [
        GenerationRequest(f"{name}{turn}", "r", "m", "c", list(prompt), OUTPUT, greedy, session=name)
        for name, prompt in prompts.items()
    ]


class Ring:
    """Its leader, with all that may happen by `chance`; None: nothing happens."""

    def __init__(self, runner: ModelRunner, store: KvStore, plans: "queue.Queue[StepPlan | None]") -> None:
        self._runner, self._plans = runner, plans
        self._parts = store.blocks_per_snapshot
        self._launches = Launches(self._execute)
        self.loads = 0

    def _execute(self, plan: StepPlan, states: list[SamplingState]) -> list[SampledToken]:
        self._plans.put(plan)
        self.loads += len(as_int32(plan.state_loads))
        logits = self._runner.forward(plan)
        assert isinstance(logits, torch.Tensor)
        return Sampler().sample(logits, states)

    def texts(
        self, asked: list[GenerationRequest], sequences: int, chance: random.Random | None
    ) -> dict[str, list[int]]:
        spec = EngineSpec(
            BLOCK_SIZE,
            WRITABLE,
            100,
            self._runner.vocab_size,
            QUANTIZED + 4 * self._parts,
            SPILLED + 4 * self._parts,
            num_states=SLOTS,
            state_blocks=self._parts,
        )
        batcher = Scheduler(spec, BatchSettings(20, sequences, session_ttl=1000.0), "m")
        coming, texts = list(asked), dict[str, list[int]]()
        while coming or batcher.has_work:
            if coming and (not batcher.has_work or (chance and chance.random() < 0.2)):
                assert batcher.add(coming.pop(0)) is None
            running = batcher._planner.running
            if chance and running and chance.random() < 0.1:
                batcher._planner.preempt(chance.choice(running))
            for entry in self._step(batcher, chance):
                texts.setdefault(entry.generation_id, []).extend(entry.tokens)
            batcher.check()
        return texts

    def _step(self, batcher: Scheduler, chance: random.Random | None) -> list[TokenEntry]:
        step = batcher.schedule()
        if step is None:
            return []
        later = batcher.schedule_ahead() if chance and chance.random() < 0.5 else None
        sampled = [
            self._launches.launch(plan, [row.sampling for row in rows]).result()
            for plan, rows in ([step] if later is None else [step, later])
        ]
        if chance and chance.random() < 0.1:
            entries = [batcher.fail_step(InternalError("as it happens"), set())]
        else:
            entries = [batcher.update(tokens) for tokens in sampled]
        return [entry for of_step in entries for entry in of_step.get("c", [])]


@pytest.mark.parametrize(
    ("model_type", "world_size", "seeds"),
    [
        ("qwen3_5_text", 1, 1),
        pytest.param("qwen3_5_text", 2, 2, marks=pytest.mark.slow),
        *(pytest.param(name, 1, 1, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_the_text_is_the_same(tmp_path: Path, model_type: str, world_size: int, seeds: int) -> None:
    build(model_type, settings_of(model_type)).save_pretrained(str(tmp_path))
    plans: queue.Queue[StepPlan | None] = queue.Queue()

    def lead(runner: ModelRunner, store: KvStore) -> None:
        ring = Ring(runner, store, plans)
        alone = ring.texts(requests(""), 1, None)
        loads = ring.loads
        for seed in range(seeds):
            said = ring.texts([*requests(""), *requests("2")], 4, random.Random(seed))
            assert said == {**alone, **{f"{name}2": text for name, text in alone.items()}}
        assert ring.loads > loads
        plans.put(None)

    def member(collectives: Collectives) -> None:
        runner, store = make_runner(tmp_path, collectives)
        if collectives.rank == 0:
            lead(runner, store)
        else:
            while (plan := plans.get(timeout=60)) is not None:
                runner.forward(plan)

    on_ring(world_size, member)
