"""What is trained is what transformers and peft would train: log probabilities and gradients, packed or alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from services.executor.training import model as training_model
from services.executor.training.base import attention
from services.executor.training.base.linear import Dropout
from services.executor.training.base.loading import check_trainable
from services.executor.training.batch import DropoutKey, PackedBatch
from shared.errors import InvalidRequest, ModelLoadError
from shared.messages.training import Hyperparameters
from tests.unit.executor.model.lanes import TRAINED, in_lanes
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.training.models import assert_as_peft, backward, batch_of, reference, trainable, worst

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("mistral", {"sliding_window": 9}),
    ("phi3", {}),
    ("granite", {"logits_scaling": 3.0}),
]


@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("mistral", {"sliding_window": 9})])
def test_long_examples_are_attended_to_by_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(attention, "_SHORT", 16)
    test_gradients_are_those_of_peft(tmp_path, model_type, changes)


OTHERS = sorted(set(TRAINED) - {model_type for model_type, _ in FAMILIES})


@pytest.mark.parametrize(
    ("model_type", "changes"), [*FAMILIES[:5], *in_lanes([*FAMILIES[5:], *((name, {}) for name in OTHERS)], ())]
)
def test_gradients_are_those_of_peft(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    directory = make_model(tmp_path / "model", model_type, **changes)
    model = trainable(directory)
    assert_as_peft(model, reference(directory), 1e-5)


def test_examples_that_are_packed_are_computed_as_each_alone(tmp_path: Path) -> None:
    model = trainable(make_model(tmp_path / "model", "gemma2", sliding_window=9))
    together = batch_of()
    log_probs, gradients = backward(model, together)
    alone: list[torch.Tensor] = []
    sums: dict[str, torch.Tensor] = {}
    for one in apart(together):
        if len(one.rows):
            found, parts = backward(model, one)
            alone.append(found)
            sums = {name: sums.get(name, torch.zeros(())) + part for name, part in parts.items()}
    torch.testing.assert_close(log_probs, torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert worst(gradients, sums) < 1e-5


def apart(batch: PackedBatch) -> list[PackedBatch]:
    """A batch for each example."""
    parts, start = [], 0
    for tokens in torch.split(batch.tokens, batch.lengths):
        mine = (batch.rows >= start) & (batch.rows < start + len(tokens))
        rows, targets, weights = batch.rows[mine] - start, batch.targets[mine], batch.weight_rows[mine]
        parts.append(PackedBatch(tokens, [len(tokens)], rows, targets, weights))
        start += len(tokens)
    return parts


def test_without_its_adapter_it_is_the_base(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", "llama")
    model, batch = trainable(directory), batch_of()
    with torch.no_grad():
        found, likeliest = model.log_probs(batch, adapter=False, dropout=None)
    logits = [reference(directory)(input_ids=one[None]).logits[0] for one in batch.tokens.split(batch.lengths)]
    expected = torch.cat(logits)[batch.rows]
    own = expected.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
    assert torch.equal(likeliest, expected.argmax(-1) == batch.targets)


def test_what_is_computed_again_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, with dropout: as it is twice, with all activations kept, and with none."""
    directory = make_model(tmp_path / "model", "gemma2")
    batch, key = batch_of(), DropoutKey(seed=5, step=3, micro_step=1)
    model = trainable(directory, Hyperparameters(rank=4, dropout=0.5), dtype=torch.bfloat16)
    kept = backward(model, batch, dropout=key)
    again = backward(model, batch, dropout=key)
    monkeypatch.setattr(training_model, "KEPT_ACTIVATIONS", 0)
    anew = backward(model, batch, dropout=key)
    other = backward(model, batch, dropout=DropoutKey(seed=5, step=4, micro_step=1))
    for log_probs, gradients in (again, anew):
        assert torch.equal(log_probs, kept[0])
        assert all(torch.equal(gradients[name], part) for name, part in kept[1].items())
    assert not torch.equal(other[0], kept[0])


def test_a_pass_that_comes_between_forward_and_backward_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DPO's reference: layers are computed again as they were, with their dropout and for their batch."""
    monkeypatch.setattr(training_model, "KEPT_ACTIVATIONS", 0)
    directory = make_model(tmp_path / "model", "llama")
    batch, key = batch_of(), DropoutKey(seed=5, step=3, micro_step=1)
    model = trainable(directory, Hyperparameters(rank=4, dropout=0.5))
    _, expected = backward(model, batch, dropout=key)
    for part in model.parameters:
        part.grad = None
    found, _ = model.log_probs(batch, adapter=True, dropout=key)
    with torch.no_grad():
        model.log_probs(batch_of((7, 9)), adapter=False, dropout=None)
    (found * batch.weight_rows).sum().backward()  # type: ignore[no-untyped-call]
    for name, factors in model.factors.items():
        assert factors.a.grad is not None
        assert torch.equal(factors.a.grad, expected[f"{name}.a"])


@pytest.mark.parametrize(("kept", "expected"), [(1 << 30, 3 + 1 + 3), (0, 3 + 1 + 3 + 3)])
def test_it_may_yield_before_each_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, expected: int
) -> None:
    """Forward, before the output layer, before each layer's backward, and where one is computed again."""
    monkeypatch.setattr(training_model, "KEPT_ACTIVATIONS", kept)
    calls: list[None] = []
    model = trainable(make_model(tmp_path / "model", "llama"), calls=calls)
    backward(model, batch_of())
    assert len(calls) == expected


def test_dropout_takes_its_share_and_keeps_the_mean() -> None:
    x = torch.ones(200, 300)
    dropped = Dropout("q_proj", DropoutKey(1, 2, 3), 0.25, x.shape[1]).of(x)
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 0.01
    assert torch.equal(dropped, Dropout("q_proj", DropoutKey(1, 2, 3), 0.25, x.shape[1]).of(x))
    for name, key in (("k_proj", DropoutKey(1, 2, 3)), ("q_proj", DropoutKey(1, 2, 4))):
        assert not torch.equal(dropped, Dropout(name, key, 0.25, x.shape[1]).of(x))


def test_factors_follow_from_the_seed_and_are_nothing_at_first(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", "llama")
    one, same, other = (trainable(directory, seed=seed, drawn=False) for seed in (7, 7, 8))
    assert [*one.factors] == sorted(one.factors)
    for name, factors in one.factors.items():
        assert torch.equal(factors.a, same.factors[name].a)
        assert not torch.equal(factors.a, other.factors[name].a)
        assert not factors.b.any()
        bound = factors.a.shape[1] ** -0.5  # peft's: uniform within 1 / sqrt(inputs)
        assert 0.8 * bound < float(factors.a.detach().abs().max()) <= bound
    shapes = {tuple(factors.a.shape) for factors in one.factors.values()}
    assert (
        len({factors.a.detach().flatten()[0].item() for factors in one.factors.values()})
        == len(one.factors)
        > len(shapes)
    )


def test_targets_are_chosen_by_the_last_parts_of_names(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", "llama")
    model = trainable(directory, Hyperparameters(rank=2, targets=["v_proj", "q_proj"]))
    assert {name.rpartition(".")[2] for name in model.factors} == {"q_proj", "v_proj"}
    assert len(model.factors) == 6
    with pytest.raises(InvalidRequest, match=r"no linear layers named lm_head, wq .* among down_proj, gate_proj"):
        trainable(directory, Hyperparameters(targets=["wq", "lm_head"]))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("mixtral", "mixture of experts"), ("deepseek_v3", "latent state"), ("mamba", "recurrent state")],
)
def test_bases_that_cannot_be_trained_say_why(tmp_path: Path, model_type: str, reason: str) -> None:
    directory = make_model(tmp_path / "model", model_type)
    with pytest.raises(ModelLoadError, match=rf"^This model cannot be fine-tuned here, since .*{reason}[^.]*\.$"):
        trainable(directory)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("falcon", "attention of 'falcon'"), ("bert", "an encoder"), ("gpt2", "type 'gpt2' are not tested")],
)
def test_what_a_configuration_says_is_refused_before_weights_are_read(model_type: str, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        check_trainable(CONFIG_MAPPING[model_type]())


def test_a_batch_whose_parts_do_not_fit_is_refused() -> None:
    tokens, rows, weights = torch.arange(5), torch.tensor([1]), torch.ones(1)
    with pytest.raises(ValueError, match="4 tokens in all do not fill a batch of 5"):
        PackedBatch(tokens, [3, 1], rows, rows, weights)
    with pytest.raises(ValueError, match="a target and a weight"):
        PackedBatch(tokens, [3, 2], rows, rows, torch.ones(2))
