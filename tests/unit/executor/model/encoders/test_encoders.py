"""Served encoders against transformers' own models: same weights, same tokens, one text at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from services.executor.collectives.base import Collectives
from services.executor.core.engine import EngineSpec
from services.executor.core.settings import ExecutorSettings
from services.executor.model.card import encoder_config
from services.executor.model.catalogue import ENCODERS
from services.executor.model.encoders.families import family_of
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import ContinuousBatcher
from services.executor.worker.encoder import EncoderRunner, load_encoder_rank
from shared.messages import GenerationRequest
from tests.unit.executor.model.encoders.tiny import config_of, make_encoder, takes_segments
from tests.unit.executor.model.ring import CPU, on_ring

TOLERANCE = 1e-4
LENGTHS = (41, 1, 17, 16, 30, 17, 2)
Vectors = dict[str, list[float]]


def prompts() -> dict[str, list[int]]:
    """None has the padding token, whose place is another where transformers counts places itself."""
    dice = np.random.default_rng(3)
    return {f"e{at}": dice.integers(4, 131, length).tolist() for at, length in enumerate(LENGTHS)}


def second_segment(prompt: list[int]) -> int:
    return len(prompt) // 2 if len(prompt) > 2 else 0


def load(directory: Path, collectives: Collectives, **settings: Any) -> tuple[EncoderRunner, EngineSpec]:
    wanted = ExecutorSettings(model=str(directory), dtype="fp32", block_size=16, **settings)
    config = encoder_config(directory)
    return load_encoder_rank(wanted, config, directory, CPU, collectives, lambda done, total: None)


def served(directory: Path, collectives: Collectives) -> Vectors:
    """What a ring tells of the prompts, several of them in a step."""
    runner, spec = load(directory, collectives)
    batcher = ContinuousBatcher(spec, BatchSettings(40, 8))
    embeds = "embed" in spec.tasks
    for name, prompt in prompts().items():
        request = GenerationRequest(
            name,
            "r",
            "m",
            "c",
            prompt,
            1,
            embed=embeds,
            classify=not embeds,
            second_segment=second_segment(prompt),
        )
        assert batcher.add(request) is None
    size = spec.embedding_size or len(spec.labels)
    found: Vectors = {}
    while (scheduled := batcher.schedule()) is not None:
        plan = scheduled[0]
        runner.forward(plan)
        pooled = runner.pooled if not collectives.rank else np.zeros((len(plan.pools) // 8, size), np.float32)
        for entries in batcher.update([], pooled=pooled).values():
            for entry in entries:
                assert entry.finish == "stop", entry.error
                found[entry.generation_id] = np.frombuffer(entry.vector, "<f4").tolist()
    return found


def inputs_of(model: Any, prompt: list[int]) -> dict[str, torch.Tensor]:
    first = family_of(model.config).first_position
    given = {
        "input_ids": torch.tensor([prompt]),
        "position_ids": torch.arange(len(prompt))[None] + first,
        "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64),
    }
    begin = second_segment(prompt)
    if takes_segments(model) and begin:
        given["token_type_ids"] = (torch.arange(len(prompt)) >= begin).long()[None]
    return given


def states_of(directory: Path) -> dict[str, torch.Tensor]:
    model = AutoModel.from_pretrained(str(directory), attn_implementation="eager").eval()
    with torch.inference_mode():
        return {
            name: model(**inputs_of(model, prompt)).last_hidden_state[0] for name, prompt in prompts().items()
        }


def logits_of(directory: Path) -> Vectors:
    model = AutoModelForSequenceClassification.from_pretrained(str(directory), attn_implementation="eager")
    model = model.eval()
    with torch.inference_mode():
        return {
            name: model(**inputs_of(model, prompt)).logits[0].tolist() for name, prompt in prompts().items()
        }


def assert_close(found: Vectors, truth: Vectors) -> None:
    assert found.keys() == truth.keys()
    for name, vector in truth.items():
        assert found[name] == pytest.approx(vector, abs=TOLERANCE), name


def ranks_of(model_type: str) -> list[int]:
    return [1, 2] if family_of(config_of(model_type)).is_flat else [1]


@pytest.mark.parametrize("model_type", ENCODERS)
def test_states_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    """Of a checkpoint with a head for masked words, where transformers has one: it is left out."""
    head = "words" if model_type not in ("data2vec-text", "gte") else ""
    directory = make_encoder(tmp_path, model_type, head)
    states = {name: state.mean(dim=0) for name, state in states_of(directory).items()}
    truth = {name: (state / state.norm()).tolist() for name, state in states.items()}
    assert len({round(vector[0], 6) for vector in truth.values()}) == len(truth)
    for world_size in ranks_of(model_type):
        assert_close(on_ring(world_size, lambda ring: served(directory, ring))[0], truth)


@pytest.mark.parametrize("model_type", ENCODERS)
def test_logits_of_classes_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    directory = make_encoder(tmp_path, model_type, "classes", num_labels=3)
    truth = logits_of(directory)
    for world_size in ranks_of(model_type):
        assert_close(on_ring(world_size, lambda ring: served(directory, ring))[0], truth)
