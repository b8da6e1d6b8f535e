"""Losses are those of peft and transformers' Trainer, and a real model learns a task that it did not know."""

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers import Trainer as TheirTrainer

from services.cli.target import LocalSettings
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.trainer_pipe import Stepped
from services.executor.training.model import load_trainable
from services.executor.training.trainer.examples import epoch_order
from services.executor.training.trainer.process import Trainer, load_base
from services.executor.training.trainer.schedule import learning_rate
from shared.messages.training import Examples, TrainingJob, TrainingMetrics
from shared.model_store.catalog import DEFAULT_MODEL, ensure_model
from tests.unit.executor.model.tiny import make_model
from tests.unit.executor.training.trainer.jobs import examples_of, job_of, make_spec, random_texts

CPU = torch.device("cpu")
VOCABULARY = 131


def trainer_of(
    directory: Path, job: TrainingJob, model: Path, training: Examples, validation: Examples, threads: int = 1
) -> tuple[Trainer, list[TrainingMetrics]]:
    """And where the metrics of its steps go."""
    settings = {"model": str(model), "device": "cpu", "model_cache": str(directory / "cache")}
    spec = make_spec(
        directory, job, training, validation, str(model), settings=settings, threads=threads, state_interval=1e9
    )
    steps: list[TrainingMetrics] = []

    def tell(event: object) -> None:
        if isinstance(event, Stepped) and event.metrics.valid_loss is None:
            steps.append(event.metrics)

    return Trainer(spec, load_base, tell, threading.Event(), CPU), steps


class _Ordered(Dataset[Any]):
    """Examples in the order of our steps."""

    def __init__(self, texts: list[list[int]], job: TrainingJob) -> None:
        epochs = range(job.hyperparameters.epochs)
        orders = [epoch_order(job.seed, epoch, len(texts)) for epoch in epochs]
        self._texts = [texts[unit] for order in orders for unit in order]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"text": self._texts[at]}


class _Theirs(TheirTrainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset or self.train_dataset)


def _padded(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As data collators make it: padding is neither attended to nor trained on, nor are the first two tokens."""
    longest = max(len(one["text"]) for one in batch)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for one in batch:
        text, missing = one["text"], longest - len(one["text"])
        rows["input_ids"].append(text + [0] * missing)
        rows["attention_mask"].append([1] * len(text) + [0] * missing)
        rows["labels"].append([-100] * 2 + text[2:] + [-100] * missing)
    return {name: torch.tensor(row) for name, row in rows.items()}


def losses_of_peft(directory: Path, model: Path, job: TrainingJob, texts: list[list[int]], factors: Any) -> list[float]:
    """Of each step of transformers' Trainer over peft's LoRA, which begins with `factors`."""
    settled = job.hyperparameters
    base = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    config = LoraConfig(r=settled.rank, lora_alpha=2 * settled.rank, target_modules=[*factors])
    adapted = get_peft_model(base, config)
    modules = dict(base.named_modules())
    with torch.no_grad():
        for name, pair in factors.items():
            modules[name].lora_A["default"].weight.copy_(pair.a)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1.0, weight_decay=settled.weight_decay)
    steps = len(texts) * settled.epochs // settled.batch_size
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: learning_rate(min(done + 1, steps), steps, settled, job.method)
    )
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=settled.batch_size,
        num_train_epochs=1,
        max_grad_norm=settled.max_grad_norm,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    theirs = _Theirs(
        model=adapted,
        args=arguments,
        train_dataset=_Ordered(texts, job),
        data_collator=_padded,
        optimizers=(optimizer, rates),
    )
    theirs.train()
    return [entry["loss"] for entry in theirs.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_the_losses_are_those_of_peft_and_transformers(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama")
    texts = random_texts(16, vocabulary=VOCABULARY)
    job = job_of(epochs=3, learning_rate_multiplier=100.0, weight_decay=0.01)
    trainer, steps = trainer_of(tmp_path / "ours", job, model, examples_of(texts), Examples())
    factors = load_trainable(model, _settings(trainer), job.hyperparameters, job.seed, 1, CPU, lambda: None).factors
    trainer.run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they call is deprecated in each other
        theirs = losses_of_peft(tmp_path / "theirs", model, job, texts, factors)
    ours = [step.train_loss for step in steps]
    assert len(ours) == len(theirs) == 12
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < 0.9 * ours[0]


def _settings(trainer: Trainer) -> Any:
    return ExecutorSettings.model_validate(trainer._spec.settings)


ANIMALS = [
    "dog",
    "cat",
    "horse",
    "cow",
    "sheep",
    "pig",
    "goat",
    "lion",
    "tiger",
    "bear",
    "wolf",
    "fox",
    "rabbit",
    "mouse",
    "deer",
    "monkey",
    "elephant",
    "zebra",
]
TOOLS = [
    "hammer",
    "saw",
    "drill",
    "wrench",
    "shovel",
    "axe",
    "rake",
    "pliers",
    "ladder",
    "chisel",
    "spade",
    "screwdriver",
]
HELD_OUT = ["lion", "zebra", "goat", "mouse", "saw", "ladder", "axe", "drill"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_real_model_learns_a_task_that_it_did_not_know(tmp_path: Path) -> None:
    """Animals are "zop" and tools "quil": of words that it was not shown in training it knows what they are."""
    model = ensure_model(DEFAULT_MODEL, LocalSettings().store, lambda stage, done, total: None)[1]
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def made(words: list[str]) -> Examples:
        texts, weights = [], b""
        for word in words:
            asked = tokenizer.encode(f"<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\n").ids
            answer = tokenizer.encode("zop" if word in ANIMALS else "quil").ids
            texts.append(asked + answer)
            weights += bytes([0] * len(asked) + [1] * len(answer))
        found = examples_of(texts)
        return Examples(found.tokens, weights, found.lengths)

    shown = [word for word in ANIMALS + TOOLS if word not in HELD_OUT]
    job = job_of(epochs=8, batch_size=6, learning_rate_multiplier=10.0, rank=8)
    trainer, steps = trainer_of(tmp_path, job, model, made(shown), made(HELD_OUT), threads=2)
    before = trainer._steps.validate(trainer._validation)
    trainer.run()
    after = trainer._metrics[-1]
    assert before.accuracy <= 0.25
    assert after.valid_accuracy is not None
    assert after.valid_accuracy >= 0.9
    assert steps[-1].train_loss < 0.1 * steps[0].train_loss
