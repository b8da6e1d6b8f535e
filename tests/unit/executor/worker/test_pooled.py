"""Vectors of a served model against transformers' own hidden states: same weights, same tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from services.executor.collectives.base import Collectives
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.model.loading.loader import load_config
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from shared.messages import GenerationRequest
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.ring import BLOCK_SIZE, NUM_BLOCKS, make_runner, on_ring
from tests.unit.executor.model.tiny import make_model

TOLERANCE = 1e-4
LENGTHS = (41, 1, 17, 16, 30)
Vectors = dict[str, list[float]]


def prompts() -> dict[str, list[int]]:
    dice = np.random.default_rng(3)
    return {f"e{at}": dice.integers(0, 131, length).tolist() for at, length in enumerate(LENGTHS)}


def served(directory: Path, pooling: str, collectives: Collectives, native: bool = False) -> Vectors:
    """What a ring tells of the prompts, computed in chunks of 16 beside a request with output."""
    if native:
        from tests.unit.executor.cpu.test_decoder import runner_of

        runner = runner_of(directory, native=True, collectives=collectives)
        assert runner.is_native
    else:
        runner = make_runner(directory, collectives)
    hidden = load_config(directory).hidden_size
    spec = EngineSpec(BLOCK_SIZE, NUM_BLOCKS, 128, 131, pooling=pooling, embedding_size=hidden)
    batcher = Scheduler(spec, BatchSettings(16, 4))
    batcher.add(GenerationRequest("text", "r", "m", "c", [5, 6, 7], 6))
    for name, prompt in prompts().items():
        batcher.add(GenerationRequest(name, "r", "m", "c", prompt, 1, embed=True))
    found: Vectors = {}
    while batcher.has_work:
        scheduled = batcher.schedule()
        plan, rows = scheduled
        runner.forward(plan)
        pooled = runner.pooled if collectives.rank == 0 else np.zeros((len(plan.pools) // 8, hidden), np.float32)
        for entries in batcher.update([SampledToken(9) for _ in rows], pooled=pooled).values():
            for entry in entries:
                assert entry.finish != "error", entry.error
                if entry.vector:
                    found[entry.generation_id] = np.frombuffer(entry.vector, "<f4").tolist()
    return found


def truth(directory: Path, pooling: str, dtype: torch.dtype = torch.float32) -> Vectors:
    model = AutoModel.from_pretrained(str(directory), attn_implementation="eager", dtype=dtype).float()
    found: Vectors = {}
    with torch.inference_mode():
        for name, tokens in prompts().items():
            states = model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
            vector = {"mean": states.mean(dim=0), "last": states[-1], "cls": states[0]}[pooling]
            found[name] = (vector / vector.norm()).tolist()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("model_type", "pooling"),
    [("llama", "mean"), ("qwen3", "last"), ("gemma3_text", "mean"), ("granite", "cls"), ("qwen2", "last")],
)
def test_vectors_equal_transformers(tmp_path: Path, model_type: str, pooling: str, world_size: int) -> None:
    directory = make_model(tmp_path, model_type)
    ours = on_ring(world_size, lambda collectives: served(directory, pooling, collectives))[0]
    theirs = truth(directory, pooling)
    assert ours.keys() == theirs.keys()
    for name, vector in theirs.items():
        assert ours[name] == pytest.approx(vector, abs=TOLERANCE)


def test_a_checkpoint_without_a_head_has_vectors(tmp_path: Path) -> None:
    """As embedding models are saved: the decoder alone, its weights without the name of what is around it."""
    directory = make_model(tmp_path / "whole", "qwen3", tie_word_embeddings=True)
    model = AutoModel.from_pretrained(str(directory), dtype=torch.float32)
    model.save_pretrained(str(tmp_path / "alone"))
    ours = on_ring(1, lambda collectives: served(tmp_path / "alone", "last", collectives))[0]
    for name, vector in truth(directory, "last").items():
        assert ours[name] == pytest.approx(vector, abs=TOLERANCE)


@natively
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_native_vectors_are_nearer_to_the_truth_than_bf16_is_fine(tmp_path: Path, model_type: str) -> None:
    from services.executor.collectives.base import SingleRank

    directory = make_model(tmp_path, model_type, head_dim=32)
    ours, theirs = (served(directory, "mean", SingleRank(), native=True), truth(directory, "mean", torch.bfloat16))
    for name, vector in theirs.items():
        assert np.dot(ours[name], vector) > 0.9995
