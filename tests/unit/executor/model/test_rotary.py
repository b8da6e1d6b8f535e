"""Rotary embeddings beyond the length of first training: what transformers computes at the served length, for all."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.executor.collectives.base import Collectives, SingleRank
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.model.catalogue import longest_context
from services.executor.model.rotary import fix_frequencies, rotary_scaling
from services.executor.worker.backends.catalog import load_share
from services.executor.worker.weights import ShareRequest, context_of
from shared.config import load_settings
from shared.errors import ConfigurationError
from tests.unit.executor.cpu.test_decoder import runner_of
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.lanes import natively
from tests.unit.executor.model.ring import CPU, Script, make_runner, on_ring
from tests.unit.executor.model.tiny import build, logits_of, make_model
from tests.unit.executor.worker.test_weights import runner_of as runner_of_share

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG_HEADS = {
    "head_dim": 32,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
        "short_factor": [1.0 + number / 10 for number in range(16)],
        "long_factor": [2.0 + number / 2 for number in range(16)],
        "original_max_position_embeddings": 64,
    },
}
LENGTH = 60  # beyond what the models of `FORMS` were first trained with
FORMS = {
    "phi3/longrope": {},
    "llama/dynamic_rope": {**DYNAMIC, "max_position_embeddings": 32},
    "llama/yarn": {"rope_parameters": YARN, "max_position_embeddings": 32},
}


def model_of(directory: Path, form: str) -> Any:
    name = form if form == "phi3/longrope" else "llama"
    model = build(name, {**settings_of(name), **FORMS[form]})
    model.save_pretrained(str(directory))
    return model


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_beyond_the_first_length_logits_are_those_of_transformers(tmp_path: Path, form: str, ranks: int) -> None:
    model = model_of(tmp_path, form)
    script = Script([LENGTH, 9])
    # A short text turns by the same frequencies, whatever transformers would give it alone.
    whole = logits_of(model, script.sequences[:1])
    fixed = copy.deepcopy(model)
    fix_frequencies(fixed, LENGTH)
    expected = [*whole, *logits_of(fixed, script.sequences[1:])]
    steps = [script.step(tokens) for tokens in ({0: 37}, {0: 21, 1: 8}, {0: 1, 1: 1}, {0: 1})]

    def work(collectives: Collectives) -> list[Tensor | None]:
        runner = make_runner(tmp_path, collectives, context=LENGTH)
        return [runner.forward(plan) for plan, _ in steps]  # type: ignore[misc]

    rows: dict[tuple[int, int], Tensor] = {}
    for (_, sampled), found in zip(steps, on_ring(ranks, work)[0], strict=True):
        assert found is not None
        rows.update(zip(sampled, found, strict=True))
    for (sequence, position), row in rows.items():
        # In the pass of its first 37 tokens transformers knows of no longer text.
        assert (row - expected[sequence][position]).abs().max() < 1e-4
    assert {position for sequence, position in rows if sequence == 0} == {36, 57, 58, 59}


def test_phimoe_turns_long_texts_by_the_long_factors(tmp_path: Path) -> None:
    """As vLLM does; transformers takes the short ones for them, and so it is given the long ones in their place."""
    model = build("phimoe", settings_of("phimoe/longrope"))
    model.save_pretrained(str(tmp_path))
    script = Script([LENGTH])
    rope = model.config.rope_parameters
    short = logits_of(model, script.sequences)[0]
    rope["short_factor"] = rope["long_factor"]
    expected = logits_of(model, script.sequences)[0]
    assert (expected - short).abs().max() > 0.1
    runner = make_runner(tmp_path, SingleRank(), context=LENGTH)
    for tokens in (37, 22, 1):
        plan, sampled = script.step({0: tokens}, every_token=True)
        rows = runner.forward(plan)
        assert isinstance(rows, Tensor)
        wanted = torch.stack([expected[position] for _, position in sampled])
        assert (rows - wanted).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("model_type", "context", "kind", "made_for"),
    [
        ("phi3", 40, "longrope", ""),
        ("phi3", 41, "longrope", "longrope-long"),
        ("phi3", 128, "longrope", "longrope-long"),
        ("phimoe", 40, "longrope", ""),
        ("phimoe", 128, "longrope", "longrope-long"),
        ("llama", 128, "dynamic", ""),
        ("llama", 300, "dynamic", "dynamic-300"),
    ],
)
def test_frequencies_are_transformers_own_at_the_served_length(
    model_type: str, context: int, kind: str, made_for: str
) -> None:
    changes = DYNAMIC if model_type == "llama" else {}
    name = "llama" if model_type == "llama" else f"{model_type}/longrope"
    config = CONFIG_MAPPING[model_type](**{**settings_of(name), **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary
    fix_frequencies(model, context)
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, seq_len=context)
    if model_type == "phimoe":
        scaling = 1.2 if context > 40 else 1.1  # long_mscale, short_mscale
    assert torch.equal(rotary.inv_freq, frequencies)
    assert rotary.attention_scaling == scaling
    for positions in (torch.arange(3), torch.arange(context)):  # whatever the length of a text
        turned = positions[:, None].float() * frequencies
        cosines, sines = rotary(torch.zeros(1), positions[None])
        half = len(frequencies)
        assert torch.allclose(cosines[0, :, :half], turned.cos() * scaling, atol=1e-6)
        assert torch.allclose(sines[0, :, half:], turned.sin() * scaling, atol=1e-6)
    assert rotary_scaling(config).made_for(context) == made_for


def test_frequencies_of_layers_that_turn_each_in_their_way() -> None:
    """Gemma 3's windows turn by themselves."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
    }
    config = CONFIG_MAPPING["gemma3_text"](**{**settings_of("gemma3_text"), "rope_parameters": rope})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary = model.model.rotary_emb = type(model.model.rotary_emb)(config)
    plain = rotary.sliding_attention_inv_freq.clone()
    fix_frequencies(model, 200)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=200, layer_type="full_attention")
    assert torch.equal(rotary.full_attention_inv_freq, expected)
    assert torch.equal(rotary.sliding_attention_inv_freq, plain)
    rotary(torch.zeros(1), torch.arange(190)[None], "full_attention")
    assert torch.equal(rotary.full_attention_inv_freq, expected)


def test_how_long_texts_may_be() -> None:
    def lengths(name: str, **changes: Any) -> tuple[int, int]:
        config = CONFIG_MAPPING[name.partition("/")[0]](**{**settings_of(name), **changes})
        return longest_context(config), rotary_scaling(config).longest

    assert lengths("phi3/longrope") == (128, 128)
    assert lengths("llama") == (128, 128)
    assert lengths("llama", **DYNAMIC) == (128, 512)
    assert lengths("llama", rope_parameters=YARN) == (128, 128)
    assert lengths("llama", rope_parameters={**YARN, "original_max_position_embeddings": 128}) == (128, 512)
    assert lengths("doge", keep_window_size=70, **DYNAMIC) == (70, 70)
    hunyuan = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}}
    assert lengths("hunyuan_v1_dense", **hunyuan) == (128, 128)

    asked = ExecutorSettings(context_length=512)
    assert context_of(asked, 128, 512) == 512
    assert context_of(ExecutorSettings(), 128, 512) == 128
    with pytest.raises(ConfigurationError, match=r"--context-length 512 is more .* choose 511 or less"):
        context_of(asked, 128, 511)


@natively
@pytest.mark.parametrize("form", ["phi3", "dynamic", "yarn"])
def test_natively_a_text_does_not_depend_on_its_neighbours_and_is_near_pytorchs(tmp_path: Path, form: str) -> None:
    """Below and beyond the length of first training, alone, in chunks and beside others: the same bits."""
    changes = {"phi3": LONG_HEADS, "dynamic": DYNAMIC, "yarn": {"rope_parameters": YARN}}[form]
    directory = make_model(tmp_path, "phi3" if form == "phi3" else "llama", **{"head_dim": 32, **changes})
    lengths = [110, 30]

    def last(batches: list[dict[int, int]], native: bool = True) -> dict[tuple[int, int], Tensor]:
        runner, script = runner_of(directory, native=native), Script(lengths)
        assert runner.is_native is native
        found = {}
        for tokens in batches:
            plan, sampled = script.step(tokens)
            found.update(zip(sampled, runner.forward(plan), strict=True))  # type: ignore[arg-type]
        return found

    together = last([{0: 60, 1: 29}, {0: 48}, {0: 1, 1: 1}, {0: 1}])
    apart = {**last([{0: 108}, {0: 1}, {0: 1}]), **last([{1: 29}, {1: 1}])}
    plain = last([{0: 60, 1: 29}, {0: 48}, {0: 1, 1: 1}, {0: 1}], native=False)
    for place in [(0, 107), (0, 108), (0, 109), (1, 28), (1, 29)]:
        assert torch.equal(together[place], apart[place]), place
        assert torch.cosine_similarity(together[place].float(), plain[place].float(), dim=0) > 0.999


@natively
def test_weights_that_were_kept_for_another_length_are_not_read(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", "phi3", **LONG_HEADS)
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**described, "dtype": "bfloat16"}))

    def is_cached(context: int) -> bool:
        settings = load_settings(
            ExecutorSettings,
            weight_cache_bytes=1 << 30,
            weight_cache_directory=str(tmp_path / "cache"),
            threads=1,
            context_length=context,
        )
        spec = RankSpec(rank=0, world_size=1, group="g", instance="i", epoch=1, board="", settings={})
        share = load_share(ShareRequest(settings, spec, directory, CPU, SingleRank(), lambda *_: None))
        if not share.is_cached:
            runner = runner_of_share(share)
            share.keep(runner.packed)
            share.settle()
        return share.is_cached

    asked = {64: False, 50: True, 65: False, 100: True, 0: True, 40: False}
    assert {context: is_cached(context) for context in asked} == asked
