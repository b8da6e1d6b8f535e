"""An encoder's steps against transformers' padded batches: `python -m benchmarks.engine.encoders --help`.

The same texts, drawn from lengths as they come in retrieval, on one rank and as many threads; transformers sorts them
by length and pads batches, as sentence-transformers does. Vectors are compared, too.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from transformers import AutoModel

from benchmarks.harness import CORES, Rounds, Sheet, Threads, in_turns, run, show, timed
from services.executor.collectives.base import SingleRank
from services.executor.core.engine import EngineSpec
from services.executor.core.settings import ExecutorSettings
from services.executor.model.card import encoder_config
from services.executor.scheduler.admission import BatchSettings
from services.executor.scheduler.batcher import ContinuousBatcher
from services.executor.worker.encoder import EncoderRunner, load_encoder_rank
from shared.messages import GenerationRequest

Vectors = NDArray[np.float32]


def draw(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Texts whose lengths are log-normal, around 40 tokens."""
    dice = np.random.default_rng(5)
    lengths = np.clip(np.exp(dice.normal(np.log(40), 0.8, count)), 4, longest).astype(int)
    return [dice.integers(5, vocabulary, length).tolist() for length in lengths]


def ours(
    runner: EncoderRunner, spec: EngineSpec, settings: BatchSettings, texts: list[list[int]]
) -> list[Vectors]:
    batcher = ContinuousBatcher(spec, settings)
    for at, text in enumerate(texts):
        batcher.add(GenerationRequest(f"{at}", "r", "m", "c", text, 1, embed=True))
    found: dict[str, Vectors] = {}
    while (scheduled := batcher.schedule()) is not None:
        runner.forward(scheduled[0])
        for entry in batcher.update([], pooled=runner.pooled)["c"]:
            found[entry.generation_id] = np.frombuffer(entry.vector, "<f4")
    return [found[f"{at}"] for at in range(len(texts))]


@torch.inference_mode()
def theirs(model: torch.nn.Module, texts: list[list[int]], batch: int) -> list[Vectors]:
    order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
    found: list[Vectors] = [np.zeros(0, np.float32)] * len(texts)
    for first in range(0, len(order), batch):
        rows = order[first : first + batch]
        width = len(texts[rows[0]])
        ids = torch.ones(len(rows), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, at in enumerate(rows):
            ids[row, : len(texts[at])] = torch.tensor(texts[at])
            mask[row, : len(texts[at])] = 1
        states = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        for at, mean in zip(rows, torch.nn.functional.normalize(means).numpy(), strict=True):
            found[at] = mean
    return found


def main(
    model: Annotated[Path, typer.Argument(help="A directory of an encoder whose vectors are means.")],
    texts: int = 256,
    dtype: str = "fp32",
    batch_tokens: int = 512,
    batch: int = 32,
    threads: Threads = CORES,
    rounds: Rounds = 3,
) -> None:
    """Texts a second."""
    torch.set_num_threads(threads)
    settings = ExecutorSettings(model=str(model), dtype=dtype, max_batch_tokens=batch_tokens)  # type: ignore[arg-type]
    cpu = torch.device("cpu")
    config = encoder_config(model)
    if config is None:
        raise typer.BadParameter(
            f"{model} holds no encoder; name a directory of one (docs/models.md#encoders)."
        )
    runner, spec = load_encoder_rank(settings, config, model, cpu, SingleRank(), lambda done, total: None)
    reference = AutoModel.from_pretrained(
        str(model), dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    ).eval()
    drawn = draw(texts, min(spec.context_length, 512), spec.vocab_size)
    limits = BatchSettings(batch_tokens, settings.max_sequences)
    work = {
        f"steps of {batch_tokens} tokens": lambda: ours(runner, spec, limits, drawn),
        f"transformers, batches of {batch}": lambda: theirs(reference, drawn, batch),
    }
    first, second = (one() for one in work.values())
    tokens, rows = sum(map(len, drawn)), []
    for name, one in work.items():
        taken = min(in_turns({name: timed(one)}, rounds)[name])
        rows.append((name, f"{texts / taken:.1f}", f"{tokens / taken:.0f}"))
    cosines = [float(np.dot(a, b)) for a, b in zip(first, second, strict=True)]
    average = f"{texts} texts of {tokens / texts:.0f} tokens on average"
    show(Sheet(("", "texts/s", "tokens/s"), rows), f"{average}; least cosine {min(cosines):.6f}")


if __name__ == "__main__":
    run(main)
