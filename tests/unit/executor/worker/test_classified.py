"""Classes of decoders, and the log probabilities of given tokens, against transformers: same weights, same tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.engine import EngineSpec, SampledToken
from services.executor.model.loading.loader import load_config
from services.executor.model.loading.output_heads import has_output_layer, read_class_head
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.worker.runner import ModelRunner
from shared.errors import ModelLoadError
from shared.messages import GenerationRequest
from tests.unit.executor.cpu.test_decoder import runner_of
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.ring import BLOCK_SIZE, NUM_BLOCKS, make_runner, on_ring
from tests.unit.executor.model.tiny import make_model, settings_for
from tests.unit.executor.worker.test_pooled import TOLERANCE, Vectors, prompts

NAMED = [17, 3, 130, 17]


def make_classifier(directory: Path, model_type: str, labels: int) -> Path:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type](**settings_for(model_type, tie_word_embeddings=False), num_labels=labels)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            spread = torch.randn(tensor.shape)
            tensor.copy_(1 + 0.1 * spread if "norm" in name else 0.12 * spread)
    model.save_pretrained(str(directory))
    return directory


def ask(runner: ModelRunner, collectives: Collectives, spec: EngineSpec, directory: Path) -> Vectors:
    """What a ring tells of the prompts, in chunks of 16 beside a text."""
    head = read_class_head(directory, load_config(directory))
    batcher = Scheduler(spec, BatchSettings(16, 4))
    if spec.generates:
        batcher.add(GenerationRequest("text", "r", "m", "c", [5, 6, 7], 6))
    for name, prompt in prompts().items():
        wanted = {"classify": True} if spec.labels else {"logprob_token_ids": NAMED}
        assert batcher.add(GenerationRequest(name, "r", "m", "c", prompt, 1, **wanted)) is None  # type: ignore[arg-type]
    found: Vectors = {}
    while (scheduled := batcher.schedule()) is not None:
        plan, rows = scheduled
        runner.forward(plan)
        pooled, scored = runner.pooled, runner.scored
        if collectives.rank:  # what it computes is told by rank 0
            pooled = np.zeros((len(plan.pools) // 8, len(spec.labels)), np.float32)
            scored = scored._replace(logprobs=np.zeros(len(plan.score_rows) // 4, np.float32))
        elif head is not None:
            pooled = head.logits(pooled)
        scores = scored if plan.score_rows else None
        for entries in batcher.update([SampledToken(9) for _ in rows], pooled=pooled, scores=scores).values():
            for entry in entries:
                assert entry.finish != "error", entry.error
                if entry.vector:
                    found[entry.generation_id] = np.frombuffer(entry.vector, "<f4").tolist()
    return found


def classifier_spec(labels: int) -> EngineSpec:
    names = [f"LABEL_{at}" for at in range(labels)]
    return EngineSpec(BLOCK_SIZE, NUM_BLOCKS, 128, 131, pooling="last", labels=names, generates=False)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("model_type", "labels"), [("qwen3", 1), ("llama", 3), ("gemma3_text", 2)])
def test_classes_of_decoders(tmp_path: Path, model_type: str, labels: int, world_size: int) -> None:
    directory = make_classifier(tmp_path, model_type, labels)
    spec = classifier_spec(labels)
    ours = on_ring(world_size, lambda ring: ask(make_runner(directory, ring), ring, spec, directory))[0]
    judge = AutoModelForSequenceClassification.from_pretrained(str(directory), attn_implementation="eager")
    judge.config.pad_token_id = judge.config.get_text_config().pad_token_id = -1  # none of the tokens
    with torch.inference_mode():
        for name, tokens in prompts().items():
            truth = judge.eval()(torch.tensor([tokens]), use_cache=False).logits[0].tolist()
            assert ours[name] == pytest.approx(truth, abs=TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2])
def test_named_tokens(tmp_path: Path, world_size: int) -> None:
    directory = make_model(tmp_path, "qwen3")
    spec = EngineSpec(BLOCK_SIZE, NUM_BLOCKS, 128, 131)
    ours = on_ring(world_size, lambda ring: ask(make_runner(directory, ring), ring, spec, directory))[0]
    truth = truth_of_named(directory, torch.float32)
    for name, logprobs in truth.items():
        assert ours[name] == pytest.approx(logprobs, abs=TOLERANCE)


@natively
def test_named_tokens_of_native_kernels(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama", head_dim=32)
    spec = EngineSpec(BLOCK_SIZE, NUM_BLOCKS, 128, 131)
    runner = runner_of(directory, native=True)
    assert runner.is_native
    ours = ask(runner, SingleRank(), spec, directory)
    for name, logprobs in truth_of_named(directory, torch.bfloat16).items():
        assert ours[name] == pytest.approx(logprobs, abs=0.1)
        assert ours[name][0] == ours[name][3]


def truth_of_named(directory: Path, dtype: torch.dtype) -> Vectors:
    model = AutoModelForCausalLM.from_pretrained(str(directory), attn_implementation="eager", dtype=dtype)
    with torch.inference_mode():
        return {
            name: model.float()(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)[NAMED].tolist()
            for name, tokens in prompts().items()
        }


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    directory = make_classifier(tmp_path, "llama", 2)
    config = load_config(directory)
    config.num_labels = 3
    with pytest.raises(ModelLoadError, match=r"score.weight of the shape \[3, "):
        read_class_head(directory, config)


def test_what_has_no_output_layer_generates_nothing(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "whole", "qwen3", tie_word_embeddings=False)
    config = load_config(directory)
    config.architectures = ["Qwen3Model"]
    assert has_output_layer(directory, config, {})
    (directory / "modules.json").write_text("[]")
    assert not has_output_layer(directory, config, {"norm.weight": None})
    assert has_output_layer(directory, config, {"lm_head.weight": None})
