"""LoRA by peft and transformers, as fast as they are on CPUs: SDPA, AdamW's fused form, no loop of the Trainer around.

padded    rows of examples of about the same length, as `group_by_length` makes them
packed    examples end to end in one row, as `DataCollatorWithFlattening` makes it: positions begin anew at each,
          and transformers makes the mask of blocks from them
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.training.examples import Example, packed_micro_batches, padded_micro_batches, trained
from benchmarks.training.task import Task

IGNORED = -100
"""A label that no loss is taken of."""


class WithPeft:
    """A model under training."""

    def __init__(self, task: Task, examples: Sequence[Example]) -> None:
        """`examples`: in the order of the steps."""
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        self._task, self._examples = task, examples
        options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
        if task.weights == "nf4":
            options["quantization_config"] = _nf4()
        base: Any = AutoModelForCausalLM.from_pretrained(task.model, **options)
        lora = LoraConfig(
            r=task.rank, lora_alpha=2 * task.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what peft calls, and what older versions have, is deprecated
            # Factors in bf16 are the fastest that peft has; in fp32, as it has them by itself, under autocast.
            self._model: Any = get_peft_model(base, lora, autocast_adapter_dtype=task.master)
            if task.recompute:
                self._model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs={"use_reentrant": False}
                )
        self._model.config.use_cache = False
        self._model.train()
        factors = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(factors, lr=1e-4, fused=True)
        self._factors = factors

    def step(self, step: int) -> float:
        examples = self._examples[(step - 1) * self._task.batch : step * self._task.batch]
        count, loss = trained(examples), 0.0
        make = packed_micro_batches if self._task.packs else padded_micro_batches
        for some in make(examples):
            inputs = packed(some) if self._task.packs else padded(some)
            with self._computing():
                # As the Trainer has it: of the tokens of all micro batches together.
                part = self._model(**inputs, num_items_in_batch=count).loss
            part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_(self._factors, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def _computing(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self._task.master else contextlib.nullcontext()


def _nf4() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


def padded(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Rows [n, longest], those of other examples' length filled up at the right."""
    longest = max(len(example.tokens) for example in examples)

    def rows(row: Callable[[Example], list[int]], rest: int) -> Tensor:
        return torch.tensor([(row(one) + [rest] * longest)[:longest] for one in examples])

    return {
        "input_ids": rows(lambda one: one.tokens, 0),
        "attention_mask": rows(lambda one: [1] * len(one.tokens), 0),
        "labels": rows(_labels, IGNORED),
    }


def packed(examples: Sequence[Example]) -> dict[str, Tensor]:
    """One row of all. No loss is taken of an example's first token, which follows another's last one."""
    tokens = [token for one in examples for token in one.tokens]
    labels = [label for one in examples for label in [IGNORED, *_labels(one)[1:]]]
    positions = [at for one in examples for at in range(len(one.tokens))]
    return {
        "input_ids": torch.tensor([tokens]),
        "labels": torch.tensor([labels]),
        "position_ids": torch.tensor([positions]),
    }


def _labels(example: Example) -> list[int]:
    return [IGNORED] * example.context + example.tokens[example.context :]
