"""Models to train in tests: what our own code and peft make of the same batch."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.executor.collectives.base import Collectives
from services.executor.core.settings import ExecutorSettings
from services.executor.training.batch import PackedBatch
from services.executor.training.model import TrainableModel, load_trainable
from shared.messages.training import Hyperparameters

CPU = torch.device("cpu")
LENGTHS = (30, 1, 17, 5)


def settings_for(directory: Path, **changes: Any) -> ExecutorSettings:
    return ExecutorSettings(
        model=str(directory), **{"model_cache": directory.parent / "cache", "threads": 2, **changes}
    )


def trainable(
    directory: Path,
    hyperparameters: Hyperparameters | None = None,
    *,
    dtype: torch.dtype | None = torch.float32,
    calls: list[None] | None = None,
    seed: int = 7,
    drawn: bool = True,
    serving_dtype: str = "auto",
    collectives: Collectives | None = None,
    **changes: Any,
) -> TrainableModel:
    """`drawn`: with factors that add something."""
    made = load_trainable(
        directory,
        settings_for(directory, dtype=serving_dtype, **changes),
        hyperparameters or Hyperparameters(rank=4),
        seed,
        2,
        CPU,
        lambda: None if calls is None else calls.append(None),
        dtype,
        collectives,
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for factors in made.factors.values() if drawn else ():
            factors.b.normal_(0, 0.1, generator=generator)
    return made


def batch_of(lengths: Sequence[int] = LENGTHS, vocabulary: int = 100, seed: int = 1) -> PackedBatch:
    """Examples of random tokens, of which two in three are trained on."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, vocabulary, (sum(lengths),), generator=generator)
    rows, start = [], 0
    for length in lengths:
        rows += [row for row in range(start, start + length - 1) if row % 3]
        start += length
    at = torch.tensor(rows)
    weights = torch.randn(len(rows), generator=generator)
    return PackedBatch(tokens, list(lengths), at, tokens[at + 1], weights)


def backward(model: TrainableModel, batch: PackedBatch, **named: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """(log probabilities, gradients by "<linear>.a" and "<linear>.b") of the weighted sum."""
    for part in model.parameters:
        part.grad = None
    found, _ = model.log_probs(batch, **{"adapter": True, "dropout": None, **named})
    (found * batch.weight_rows).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {
        f"{name}.{part}": parameter.grad
        for name, factors in model.factors.items()
        for part, parameter in (("a", factors.a), ("b", factors.b))
        if parameter.grad is not None
    }
    return found.detach(), gradients


def reference(directory: Path, weights: dict[str, Tensor] | None = None) -> Any:
    """transformers' own model in fp32, with other `weights`, by the names of their modules."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in (weights or {}).items():
            model.get_submodule(name).weight.copy_(weight)
    return model


def backward_of_peft(
    base: Any, model: TrainableModel, batch: PackedBatch, rank: int = 4
) -> tuple[Tensor, dict[str, Tensor]]:
    """As `backward`, by peft with the same factors: each example by itself, by torch's own autograd."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft calls is deprecated in transformers
        adapted = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[*model.factors]))
    modules = dict(base.named_modules())
    parts: dict[str, Tensor] = {}
    for name, factors in model.factors.items():
        for part, side in (("a", modules[name].lora_A), ("b", modules[name].lora_B)):
            parameter = side["default"].weight
            parameter.data.copy_(getattr(factors, part).data)
            parts[f"{name}.{part}"] = parameter
    logits = [adapted(input_ids=one[None]).logits[0].float() for one in torch.split(batch.tokens, batch.lengths)]
    found = torch.cat(logits).log_softmax(-1)[batch.rows, batch.targets]
    (found * batch.weight_rows).sum().backward()  # type: ignore[no-untyped-call]
    return found.detach(), {name: part.grad for name, part in parts.items() if part.grad is not None}


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


def assert_as_peft(model: TrainableModel, base: Any, within: float = 1e-4) -> None:
    """Log probabilities and gradients are those of peft over `base`."""
    batch = batch_of()
    ours, gradients = backward(model, batch)
    theirs, expected = backward_of_peft(base, model, batch)
    torch.testing.assert_close(ours, theirs, rtol=within, atol=within)
    assert worst(gradients, expected) < within
