"""Served encoders against transformers' own models: same weights, same tokens, one text at a time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from services.executor.collectives.base import Collectives
from services.executor.core.engine import EngineSpec
from services.executor.core.settings import ExecutorSettings
from services.executor.families.registry import ENCODERS
from services.executor.model.adapters.files import inspect_adapter
from services.executor.model.card import encoder_config
from services.executor.model.conversion.convert import open_model
from services.executor.model.encoders import attention
from services.executor.model.encoders.families import family_of
from services.executor.model.loading.checkpoints import convert_gguf
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import Scheduler
from services.executor.supervisor.host.model_files import size_of
from services.executor.worker.encoder import EncoderRunner, load_encoder_rank
from shared.errors import ConfigurationError, ModelLoadError
from shared.messages import GenerationRequest
from tests.unit.executor.model.encoders.tiny import config_of, make_encoder, takes_segments
from tests.unit.executor.model.gguf_models import finish
from tests.unit.executor.model.lanes import in_lanes
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
    batcher = Scheduler(spec, BatchSettings(40, 8))
    embeds = "embed" in spec.tasks
    for name, prompt in prompts().items():
        request = GenerationRequest(
            name, "r", "m", "c", prompt, 1, embed=embeds, classify=not embeds, second_segment=second_segment(prompt)
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
        return {name: model(**inputs_of(model, prompt)).last_hidden_state[0] for name, prompt in prompts().items()}


def logits_of(directory: Path) -> Vectors:
    model = AutoModelForSequenceClassification.from_pretrained(str(directory), attn_implementation="eager")
    model = model.eval()
    with torch.inference_mode():
        return {name: model(**inputs_of(model, prompt)).logits[0].tolist() for name, prompt in prompts().items()}


def assert_close(found: Vectors, truth: Vectors) -> None:
    assert found.keys() == truth.keys()
    for name, vector in truth.items():
        assert found[name] == pytest.approx(vector, abs=TOLERANCE), name


def ranks_of(model_type: str) -> list[int]:
    return [1, 2] if family_of(config_of(model_type)).is_flat else [1]


# For `make test`: places that are added, that are relative, that are rotated, and both ways of a decoder.
SOME = {"bert", "xlm-roberta", "mpnet", "modernbert", "gte", "gemma3_text"}


@pytest.mark.parametrize("model_type", in_lanes([*ENCODERS, "gemma3_text"], SOME))
def test_states_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    """Of a checkpoint with a head for masked words, where transformers has one: it is left out."""
    head = "words" if model_type not in ("data2vec-text", "gte", "gemma3_text") else ""
    directory = make_encoder(tmp_path, model_type, head)
    states = {name: state.mean(dim=0) for name, state in states_of(directory).items()}
    truth = {name: (state / state.norm()).tolist() for name, state in states.items()}
    assert len({round(vector[0], 6) for vector in truth.values()}) == len(truth)
    for world_size in ranks_of(model_type):
        assert_close(on_ring(world_size, lambda ring: served(directory, ring))[0], truth)


@pytest.mark.parametrize("model_type", in_lanes(ENCODERS, ["bert", "modernbert"]))
def test_logits_of_classes_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    directory = make_encoder(tmp_path, model_type, "classes", num_labels=3)
    truth = logits_of(directory)
    for world_size in ranks_of(model_type):
        assert_close(on_ring(world_size, lambda ring: served(directory, ring))[0], truth)


def write_modules(directory: Path, *kinds: str, **pooling: bool) -> None:
    modules = [
        {"path": f"{at}_{kind}", "type": f"sentence_transformers.models.{kind}"} for at, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_a_directory_of_sentence_transformers(tmp_path: Path) -> None:
    """Its pooling, a layer behind it, and vectors that nobody brings to length 1."""
    directory = make_encoder(tmp_path, "roberta")
    write_modules(directory, "Transformer", "Pooling", "Dense", pooling_mode_cls_token=True)
    (directory / "2_Dense").mkdir()
    dense = {"in_features": 48, "out_features": 6, "activation_function": "torch.nn.modules.activation.Tanh"}
    (directory / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weight, bias = torch.randn(6, 48), torch.randn(6)
    save_file({"linear.weight": weight, "linear.bias": bias}, directory / "2_Dense" / "model.safetensors")
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    truth = {name: torch.tanh(weight @ state[0] + bias).tolist() for name, state in states_of(directory).items()}
    assert_close(on_ring(1, lambda ring: served(directory, ring))[0], truth)
    _, spec = on_ring(1, lambda ring: load(directory, ring))[0]
    assert (spec.context_length, spec.embedding_size, spec.pooling) == (48, 6, "cls")
    assert (spec.tasks, spec.normalized, spec.labels) == (["embed"], False, [])
    _, longer = on_ring(1, lambda ring: load(directory, ring, context_length=68))[0]
    assert longer.context_length == 68  # two places before the first token's are the padding's
    (directory / "2_Dense" / "config.json").write_text(json.dumps(dense | {"in_features": 40}))
    with pytest.raises(ModelLoadError, match="takes 40 numbers and is given 48"):
        on_ring(1, lambda ring: load(directory, ring))
    (directory / "2_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": weight}, directory / "2_Dense" / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"no linear.bias of the shape \[6\]"):
        on_ring(1, lambda ring: load(directory, ring))


def test_the_last_token(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "eurobert")
    write_modules(directory, "Transformer", "Pooling", "Normalize", pooling_mode_lasttoken=True)
    truth = {name: (state[-1] / state[-1].norm()).tolist() for name, state in states_of(directory).items()}
    assert_close(on_ring(1, lambda ring: served(directory, ring))[0], truth)


@pytest.mark.parametrize("window", [None, 5])
def test_long_texts_attend_in_pieces(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces, and with progress between them."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    monkeypatch.setattr(attention, "_ROWS", 7)
    ticks: list[int] = []
    texts = attention.Texts([19, 1, 10], lambda: ticks.append(1))
    found, _ = attention.text_attention(
        torch.nn.Identity(), query, key, value, None, texts=texts, scaling=0.3, sliding_window=window
    )
    assert len(ticks) == 3 + 1 + 2
    text = torch.repeat_interleave(torch.arange(3), torch.tensor([19, 1, 10]))
    at = torch.arange(30)
    seen = text[:, None] == text
    if window is not None:
        seen &= (at[:, None] - at).abs() < window
    keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    scores = (query @ keys.transpose(-1, -2) * 0.3).masked_fill(~seen, float("-inf"))
    truth = (scores.softmax(-1) @ values).transpose(1, 2)
    assert torch.allclose(found, truth, atol=1e-5)
    for wrong in ({"softcap": 30.0}, {"s_aux": torch.ones(4)}):
        with pytest.raises(ModelLoadError, match=f"asks for {next(iter(wrong))}"):
            attention.text_attention(torch.nn.Identity(), query, key, value, None, texts=texts, **wrong)


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    for model_type, ranks, message in (
        ("mpnet", 2, "computed by one rank, and --tp is 2"),
        ("bert", 5, "4 attention heads"),
    ):
        directory = make_encoder(tmp_path / model_type, model_type)
        with pytest.raises(ConfigurationError, match=message):
            on_ring(ranks, lambda ring, directory=directory: load(directory, ring))  # type: ignore[misc]


def test_files_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert")
    config = json.loads((directory / "config.json").read_text())

    def refused(**changes: Any) -> str:
        (directory / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises((ModelLoadError, ConfigurationError)) as error:
            on_ring(1, lambda ring: load(directory, ring))
        return str(error.value)

    assert "hold a tensor encoder.layer.1" in refused(num_hidden_layers=1)
    assert "no tensor encoder.layer.2" in refused(num_hidden_layers=3)
    assert "has the shape" in refused(intermediate_size=80)
    assert "is_decoder" in refused(is_decoder=True)
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert "is quantized" in refused(**quantized)
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="--weight-dtype is int8"):
        on_ring(1, lambda ring: load(directory, ring, weight_dtype="int8"))
    with pytest.raises(ConfigurationError, match="--weights-memory is for models"):
        on_ring(1, lambda ring: load(directory, ring, weights_memory=1))


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert", "classes", num_labels=2)
    weights = load_file(directory / "model.safetensors")
    weights["classifier.bias"] = torch.full((2,), float("nan"))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="NaN or infinite"):
        on_ring(1, lambda ring: load(directory, ring))


def test_encoders_are_not_converted_or_adapted_and_some_not_read_from_gguf(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path / "bert", "bert")
    with pytest.raises(ModelLoadError, match="take no LoRA adapters; merge the adapter"):
        inspect_adapter(tmp_path, encoder_config(directory))
    with pytest.raises(ModelLoadError, match="is not converted"), open_model(directory):
        pass
    writer = GGUFWriter(tmp_path / "bert.gguf", "nomic-bert-moe")
    writer.add_context_length(512)
    finish(writer)
    with pytest.raises(
        ModelLoadError,
        match=r"architecture 'nomic-bert-moe' is not served from GGUF files: transformers' NomicBERT has no experts",
    ):
        convert_gguf(tmp_path / "bert.gguf", tmp_path / "made", lambda *stage: None)


def test_an_encoder_takes_no_memory_for_sequences(tmp_path: Path) -> None:
    settings = ExecutorSettings()
    assert size_of(settings, make_encoder(tmp_path / "bert", "bert")).sequence == 0
    runner, spec = on_ring(1, lambda ring: load(tmp_path / "bert", ring))[0]
    assert spec.capacity >= spec.context_length
    assert not runner.can_launch(1)
    assert runner.packed is None
    runner.close()
