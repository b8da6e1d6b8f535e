"""Ranks that train together compute what one process computes: log probabilities, and gradients that add up to its."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from services.executor.collectives.shared_memory import SharedMemory, can_share_memory, make_area
from services.executor.training import model as training_model
from services.executor.training.batch import DropoutKey
from services.executor.training.ranks import WithGradients
from shared.messages.training import Hyperparameters
from tests.unit.executor.model.lanes import TRAINED, in_lanes, natively
from tests.unit.executor.model.loading.quantized_weights import FORMS
from tests.unit.executor.model.loading.test_quantized_checkpoints import make_checkpoint
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.training.models import backward, batch_of, trainable, worst
from tests.unit.executor.training.test_bases import CACHED, said_to_be_bf16

pytestmark = pytest.mark.skipif(not can_share_memory(), reason="there are no collectives in shared memory here")
KEY = DropoutKey(5, 2, 0)
WITH_DROPOUT = Hyperparameters(rank=4, dropout=0.2)

Computed = tuple[Tensor, dict[str, Tensor]]


def between_ranks(directory: Path, ranks: int, **named: Any) -> list[Computed]:
    """What each of so many computes, gradients of all of them added up."""
    area = make_area(ranks, 1)
    rings = [WithGradients(SharedMemory(area, rank, ranks, timeout=120)) for rank in range(ranks)]
    models = [trainable(directory, WITH_DROPOUT, collectives=ring, **named) for ring in rings]

    def work(rank: int) -> Computed:
        log_probs, parts = backward(models[rank], batch_of(), dropout=KEY)
        summed = {name: rings[rank].all_reduce(parts[name].contiguous()) for name in sorted(parts)}
        return log_probs, summed

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, range(ranks)))


def alone(directory: Path, **named: Any) -> Computed:
    return backward(trainable(directory, WITH_DROPOUT, **named), batch_of(), dropout=KEY)


def check(directory: Path, ranks: int, within: float = 1e-5, **named: Any) -> None:
    expected, gradients = alone(directory, **named)
    first, *others = between_ranks(directory, ranks, **named)
    torch.testing.assert_close(first[0], expected, rtol=within, atol=within)
    assert worst(first[1], gradients) < within
    for log_probs, summed in others:
        assert torch.equal(log_probs, first[0])
        assert all(torch.equal(summed[name], first[1][name]) for name in summed)


FAMILIES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {}),  # three KV heads: the ranks share one
    ("llama", 3, {"num_key_value_heads": 1}),
    ("qwen2", 3, {"tie_word_embeddings": False}),
    ("gemma2", 2, {"num_key_value_heads": 1}),
    ("olmo2", 2, {}),  # norms over all heads
    ("phi3", 2, {}),  # fused projections
]
OTHERS = sorted(set(TRAINED) - {model_type for model_type, _, _ in FAMILIES})


@pytest.mark.parametrize(
    ("model_type", "ranks", "changes"),
    [*FAMILIES[:3], *in_lanes(FAMILIES[3:], ()), *in_lanes([(name, 2, {}) for name in OTHERS], (), ())],
)
def test_their_gradients_add_up(tmp_path: Path, model_type: str, ranks: int, changes: dict[str, Any]) -> None:
    check(make_model(tmp_path / "model", model_type, **changes), ranks)


def test_so_they_do_where_layers_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some layers: the ranks agree on which."""
    directory = make_model(tmp_path / "model", "llama")
    (layer,) = {*trainable(directory)._widths}
    kept = int(layer * sum(batch_of().lengths) * 4 * training_model._KEPT_SHARE)
    monkeypatch.setattr(training_model, "KEPT_ACTIVATIONS", kept)
    check(directory, 2)


@natively
@pytest.mark.parametrize("form", in_lanes(["awq", "nf4"], ["awq"], []))
def test_each_maps_its_share_of_packed_weights(tmp_path: Path, form: str) -> None:
    directory = said_to_be_bf16(make_checkpoint(tmp_path, "llama", FORMS[form]).quantized)
    check(directory, 2, 1e-4, **CACHED)
    assert len([*(tmp_path / "cache" / ".packed").glob("*.packed")]) == 3, "the whole one's, and one of each rank"
    with capture_logs() as log:
        between_ranks(directory, 2, **CACHED)
    assert {entry.get("base") for entry in log} == {"packed weights"}
