"""QLoRA of a 7B: the trainer's own steps over a base of 4 bits a weight, tokens/s, memory, and how long a job of 10,000
examples takes: `python -m benchmarks.gpu --only training`.

Each example has 512 tokens, of which half are learnt; four are computed at once, sixteen are a step.
What a token costs:

    products       2 operations a weight each, forward, again for the gradients (recomputing), backward to the inputs
    factors        2 a number each, forward and recomputing, 4 backward (their inputs, and themselves)
    attention      4 for each head's width and pair of tokens, forward and recomputing; 2.5 times that backward
    output layer   of learnt tokens alone: the logits, and the gradient that is made of them on the way
"""

import os
import threading
import time
from array import array
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.machine import release, wait
from benchmarks.on_gpu.shapes import LLAMA_7B, TINY, Shape

EXAMPLES = 10_000
GOAL_MINUTES = 60.0


@dataclass(frozen=True)
class Work:
    """What one job does."""

    shape: Shape
    length: int  # tokens of an example; the second half of them is learnt
    batch: int  # examples of a step
    rank: int = 16
    codec: str = "q4_k"

    @property
    def factors(self) -> int:
        """Numbers that are trained, of all linears of all layers."""
        shape = self.shape
        kv = shape.kv_heads * shape.head_dim
        widths = 2 * (shape.hidden + shape.hidden) + 2 * (shape.hidden + kv) + 3 * (shape.hidden + shape.inner)
        return shape.layers * self.rank * widths

    def flops(self, examples: int) -> float:
        shape = self.shape
        tokens = examples * self.length
        pairs = examples * self.length * (self.length + 1) / 2
        products = 6.0 * tokens * shape.layers * shape.layer_weights
        attention = 4.5 * 4.0 * shape.layers * shape.heads * shape.head_dim * pairs
        return products + 8.0 * tokens * self.factors + attention + 4.0 * tokens / 2 * shape.head_weights

    @property
    def held_bytes(self) -> float:
        """Codes, embedding and head; factors, their gradients and both moments in float32; the input of each layer, and
        one layer's activations, of a micro batch of 2,048 tokens."""
        shape, tokens = self.shape, 2048
        widths = 6 * shape.hidden + 2 * (shape.hidden + shape.kv_heads * shape.head_dim) + 3 * shape.inner
        activations = 2 * tokens * (shape.layers * shape.hidden + 1.25 * widths)
        return shape.held_bytes("q4_k") + 16 * self.factors + activations


QLORA = Work(LLAMA_7B, length=512, batch=16)
DRY = Work(TINY, length=24, batch=2, rank=4, codec="int4")


def run(bench: Bench) -> None:
    work = DRY if bench.tiny else QLORA
    # As the trainer's process has it: the same sums in every run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.enable_grad():
            _measure(bench, work)
    finally:
        torch.use_deterministic_algorithms(before)
        release(bench.device)


def _measure(bench: Bench, work: Work) -> None:
    steps = steps_of(work, bench.device)
    if bench.device.type == "cuda":  # making the model took more
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
    loss = steps.compute(1, 0).train_loss  # compiles
    wait(bench.device)
    most = 2 if bench.tiny else 8
    took: list[float] = []
    while len(took) < most and (not took or bench.left() > 0):
        began = time.perf_counter()
        steps.compute(2 + len(took), 0)
        wait(bench.device)
        took.append(time.perf_counter() - began)
    tokens = work.batch * work.length
    seconds = sorted(took)[len(took) // 2]
    rate = bench.matrix_rate("bf16")
    limit = tokens * rate / work.flops(work.batch) if rate else None
    key = f"training/{work.shape.name.lower()}/{work.codec}"
    what = f"QLoRA of a {work.shape.name}, {work.codec}, rank {work.rank}"
    note = f"{seconds:.3f} s a step of {work.batch} examples of {work.length}, median of {len(took)}; loss {loss:.2f}"
    bench.measured(f"{key}/tokens", f"{what}: training", tokens / seconds, "tok/s", limit, note)
    minutes = EXAMPLES / work.batch * seconds / 60
    verdict = "under an hour" if minutes < GOAL_MINUTES else "more than an hour"
    bench.measured(
        f"{key}/projected",
        f"{what}: {EXAMPLES:,} examples of {work.length} tokens, projected",
        minutes,
        "min",
        note=verdict,
    )
    if bench.device.type == "cuda":
        held = torch.cuda.max_memory_allocated(bench.device) / 1e9
        bench.measured(
            f"{key}/memory", f"{what}: memory", held, "GB", note=f"by arithmetic {work.held_bytes / 1e9:.1f} GB"
        )


def steps_of(work: Work, device: torch.device) -> Any:
    """Of a trainer whose base has random codes, made on `device`."""
    from benchmarks.on_gpu.served import served_model
    from services.executor.model.quantizing import CODECS
    from services.executor.training.base import loading
    from services.executor.training.model import TrainableModel
    from services.executor.training.trainer.examples import read_examples
    from services.executor.training.trainer.optimizer import FactorOptimizer
    from services.executor.training.trainer.process import Gate
    from services.executor.training.trainer.schedule import course_of
    from services.executor.training.trainer.steps import SingleReplica, Steps, named_factors
    from shared.messages.training import Examples, Hyperparameters, TrainingJob

    codec = CODECS[work.codec]
    made = served_model(work.shape.config(), torch.bfloat16, device, codec=codec)
    base = loading._base(made, "random codes", device, torch.bfloat16)  # noqa: SLF001
    hyperparameters = Hyperparameters(epochs=1, batch_size=work.batch, learning_rate_multiplier=1.0, rank=work.rank)
    gate = Gate(device, threading.Event())
    model = TrainableModel(base, hyperparameters, 1, gate)
    count = 16 * work.batch
    learnt = work.length // 2
    numbers = torch.randint(3, work.shape.vocabulary, (count * work.length,), dtype=torch.int32)
    known = Examples(
        numbers.numpy().tobytes(),
        (b"\0" * (work.length - learnt) + b"\1" * learnt) * count,
        array("I", [work.length] * count).tobytes(),
    )
    examples = read_examples(known, 1, "training")
    job = TrainingJob("ftjob-gpu", "", 0.0, "random", "supervised", "", "", 1, hyperparameters)
    optimizer = FactorOptimizer(named_factors(model), hyperparameters, device)
    course = course_of(hyperparameters, count)
    return Steps(job, model, optimizer, examples, course, device, SingleReplica())
