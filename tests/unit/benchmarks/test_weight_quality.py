"""The benchmark computes as the model does, and leaves it as it was."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.weight_quality import (
    WAYS,
    Logits,
    Way,
    by_the_executor,
    by_transformers,
    computing,
    linears_of,
    read_text,
    rounded,
    widened,
)
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.model.conversion.gguf_types import GgufDtype
from services.executor.model.quantizing import CODECS
from services.executor.native.library import why_not
from tests.unit.executor.model.tiny import make_model, reference_logits

TRIED = [
    way for way in WAYS if not way.served and (not way.name.startswith("GGUF") or way.name.startswith("GGUF q4_k_m"))
]
TEXTS = np.random.default_rng(5).integers(0, 131, (3, 40))


def test_each_way_changes_what_it_says_and_no_more(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama")
    expected = torch.stack(reference_logits(directory, TEXTS.tolist()))
    known = torch.from_numpy(TEXTS[:, 1:]).flatten()
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), known, reduction="sum")
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    assert len(list(linears_of(model, WAYS[0]))) == 0
    # Seven linear layers in each of three, and on CPUs the embedding, which is the head as well.
    assert len(list(linears_of(model, Way("", INT8)))) == 3 * 7
    assert len(list(linears_of(model, Way("", CODECS["q4_k"])))) == 3 * 7 + 1
    losses, divergences = [], []
    plain = Logits(tmp_path, TEXTS, 131)
    for way in (*TRIED, WAYS[0]):
        with computing(model, way):
            reading = read_text(by_transformers(model), TEXTS, 2, plain)
        losses.append(reading.loss)
        divergences.append(reading.divergence)
    assert losses[0] == losses[-1] == pytest.approx(float(loss), rel=1e-5)
    assert len(set(losses)) == len(TRIED)
    assert all(abs(other / losses[0] - 1) < 0.05 for other in losses)
    assert divergences[0] == 0 <= divergences[-1] < 1e-4
    assert all(divergences[-1] < other < 1 for other in divergences[1:-1])
    coarse, fine = (divergences[[way.name for way in TRIED].index(name)] for name in ("q4_k", "q8_0"))
    assert coarse > 10 * fine


def test_a_rounded_row_is_near(tmp_path: Path) -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    most = rows.abs().amax(1, keepdim=True)
    assert bool(((widened(rows, INT8) - rows).abs() <= most / 253).all())
    assert bool(((widened(rows, FP8) - rows).abs() <= rows.abs() / 15.9 + most / 2**17).all())
    # A group of 32 has a scale of its own.
    rows[:, 40] = 1e4
    assert bool(((rounded(rows) - rows)[:, :32].abs() <= rows[:, :32].abs().amax(1, keepdim=True) / 253).all())


@pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")
def test_what_is_served_is_what_was_simulated(tmp_path: Path) -> None:
    directory = make_model(tmp_path, "llama", head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32).eval()
    readings = {}
    plain = Logits(tmp_path, TEXTS, 131)
    for name in ("plain", "as it is, served", "q4_k, activations too", "q4_k, served"):
        way = next(way for way in WAYS if way.name == name)
        compute = by_transformers(model)
        if way.served:
            assert not isinstance(way.codec, GgufDtype | Codec)
            compute = by_the_executor(directory, way.codec, 2, TEXTS.shape[1])
        with computing(model, way) if not way.served else nullcontext():
            readings[name] = read_text(compute, TEXTS, 2, plain)
    assert 0 < readings["as it is, served"].divergence < 0.1 * readings["q4_k, served"].divergence
    served, simulated = readings["q4_k, served"], readings["q4_k, activations too"]
    assert served.divergence == pytest.approx(simulated.divergence, rel=0.2)
    assert served.loss == pytest.approx(simulated.loss, rel=1e-3)


def test_what_is_skipped_is_read_and_not_counted(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(make_model(tmp_path, "llama")), dtype=torch.float32).eval()
    whole, late = (read_text(by_transformers(model), TEXTS, 3), read_text(by_transformers(model), TEXTS, 3, skip=20))
    early = read_text(by_transformers(model), TEXTS[:, :21], 3)
    assert late.loss == pytest.approx(whole.loss - early.loss, rel=1e-5)
