"""A model of which a small one is right as often as wanted, at as many times its cost: for benchmarks of draft models.

`python -m benchmarks.engine.noisy_target SMALL_MODEL DIRECTORY` writes two models in bf16:

    draft    the small one as it is
    target   the small one with further layers behind its own, whose outputs are noise that is added to what it computes

A token of the target costs `times` as many bytes of weights. How large the noise is decides how often both would say
the same, and is found by trying. For Llamas, in any format that is served.

`python -m benchmarks.engine.speculation DIRECTORY/target --draft DIRECTORY/draft` measures the two.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.engine.steps import BLOCK, Row, load_one_rank, step_plan
from benchmarks.errors import BenchError
from benchmarks.harness import Threads, run
from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import to_bytes
from services.executor.model.loading.loader import load_config, load_model

_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""What a layer adds to the residual stream comes from these."""
_FIRST, _HEAD = "model.layers.0.", "lm_head.weight"
_PER_FILE = 32
"""Layers."""
_TRIES = 8
_LEAST, _MOST = 1e-3, 3.0
"""Sizes of the noise that are tried, of the small model's own weights."""
LENGTH = 256
"""Tokens of the text by which both are compared."""


def config_of(small: Path) -> dict[str, Any]:
    """Raises BenchError where it is no Llama."""
    config: dict[str, Any] = json.loads((small / "config.json").read_bytes())
    if config.get("model_type") != "llama":
        raise BenchError(f"{small} is no Llama; give the directory of one.")
    return config


def write_description(small: Path, directory: Path, config: dict[str, Any]) -> None:
    """All of a model but its weights: tokenizer and template of the small one, and a configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in small.iterdir():
        if path.suffix in (".json", ".jinja") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, directory / path.name)
    (directory / "config.json").write_text(json.dumps(config))


@dataclass
class Target:
    """The model that is being made."""

    directory: Path
    like: dict[str, torch.Tensor]
    """The first layer of the small one."""
    layers: int
    """Of the small model."""
    added: int

    @classmethod
    def begin(cls, small: Path, directory: Path, times: float) -> "Target":
        """Both models in `directory`, but for the noise. Raises BenchError where the small one is not of the kind."""
        config = config_of(small)
        tensors = tensors_of(small, tied=config.get("tie_word_embeddings", False))
        first = first_layer(tensors)
        layers, head = config["num_hidden_layers"], config["vocab_size"] * config["hidden_size"]
        one = sum(tensor.numel() for tensor in first.values())
        added = round((times - 1) * (layers * one + head) / one)
        for name, count in (("draft", layers), ("target", layers + added)):
            described = {**config, "num_hidden_layers": count, "dtype": "bfloat16"}
            write_description(small, directory / name, described)
            save_file(tensors, directory / name / "small.safetensors", metadata={"format": "pt"})
            _write_index(directory / name)
        made = cls(directory / "target", first, layers, added)
        made.write_inner()
        return made

    def write_noise(self, size: float) -> None:
        """The outputs of the added layers, of `size`; and the index of all files."""
        random = torch.Generator().manual_seed(2)
        for file, numbers in self._files("noise"):
            tensors = {
                f"model.layers.{number}.{output}": _noise(self.like[_FIRST + output], random, size)
                for number in numbers
                for output in _OUTPUTS
            }
            save_file(tensors, file, metadata={"format": "pt"})
        _write_index(self.directory)

    def write_inner(self) -> None:
        """All of the added layers but their outputs."""
        random = torch.Generator().manual_seed(1)
        for file, numbers in self._files("inner"):
            tensors = {
                name.replace(_FIRST, f"model.layers.{number}."): (
                    _noise(tensor, random) if tensor.dim() > 1 else tensor.clone()
                )
                for number in numbers
                for name, tensor in self.like.items()
                if not name.endswith(_OUTPUTS)
            }
            save_file(tensors, file, metadata={"format": "pt"})

    def _files(self, kind: str) -> list[tuple[Path, range]]:
        end = self.layers + self.added
        starts = range(self.layers, end, _PER_FILE)
        return [
            (self.directory / f"{kind}-{at}.safetensors", range(at, min(end, at + _PER_FILE)))
            for at in starts
        ]


def _write_index(directory: Path) -> None:
    found: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))


def tensors_of(directory: Path, *, tied: bool) -> dict[str, torch.Tensor]:
    """In bf16, by the names of Hugging Face's checkpoints; `tied`: without an output layer."""
    config = load_config(directory)
    layout, device = ShardLayout.from_config(config, 1, 0), torch.device("cpu")
    model = load_model(
        directory, torch.bfloat16, layout, SingleRank(), device, lambda done, total: None, None
    )
    state = model.state_dict()
    return {name: tensor.contiguous() for name, tensor in state.items() if not (tied and name == _HEAD)}


def first_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one for name, one in tensors.items() if name.startswith(_FIRST)}


def _noise(like: torch.Tensor, random: torch.Generator, size: float = 1.0) -> torch.Tensor:
    deviation = float(like.float().std()) * size
    return torch.empty(like.shape, dtype=torch.float32).normal_(0, deviation, generator=random).to(like.dtype)


class Sayings:
    """What a model would say behind each token of a text."""

    def __init__(self, directory: Path, threads: int) -> None:
        runner, _ = load_one_rank(directory, "bf16", threads, 2 * LENGTH // BLOCK)
        self._runner: Any = runner

    def of(self, text: Sequence[int], start: int = 0) -> np.ndarray[Any, Any]:
        """From the place `start` on; what is before it has been computed."""
        end, tokens = len(text), to_bytes(list(text[start:]))
        row = Row(end, end - start, range(-(-end // BLOCK)))
        plan = step_plan([row], token_ids=tokens, sample_rows=to_bytes(np.arange(end - start)))
        return np.asarray(self._runner.forward(plan).argmax(dim=-1))

    def text(self, begin: Sequence[int]) -> list[int]:
        """What it goes on with, greedily."""
        found = [*begin, int(self.of(begin)[-1])]
        while len(found) < LENGTH:
            found.append(int(self.of(found, len(found) - 1)[-1]))
        return found


def agreement(said: np.ndarray[Any, Any], target: Sayings, text: Sequence[int]) -> float:
    """Share of the places of `text` where `target` says what the small model has `said`."""
    return float((target.of(text) == said).mean())


def make(small: Path, directory: Path, times: float, right: float, threads: int) -> float:
    """Makes the model; returns how often the small one says what it does."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(small))
    target = Target.begin(small, directory, times)
    own = Sayings(directory / "draft", threads)
    text = own.text(tokenizer.encode("The history of the lighthouse begins with")[:16])
    return fit(target, text, own.of(text), right, threads)


def fit(target: Target, text: Sequence[int], said: np.ndarray[Any, Any], right: float, threads: int) -> float:
    """Finds the noise with which the target says what is `said` behind each token of `text` as often as `right`;
    returns how often it does."""
    found = 0.0
    low, high = np.log(_LEAST), np.log(_MOST)
    for _ in range(_TRIES):
        size = float(np.exp((low + high) / 2))
        target.write_noise(size)
        found = agreement(said, Sayings(target.directory, threads), text)
        typer.echo(f"noise of {size:.4g}: the same in {found:.0%} of {len(text)} places")
        if abs(found - right) < 0.02:
            break
        low, high = ((low + high) / 2, high) if found > right else (low, (low + high) / 2)
    return found


Times = Annotated[float, typer.Option(help="What a token costs, of the small model's, or of the head's.")]
Right = Annotated[float, typer.Option(help="How often both say the same.")]


def main(
    small: Annotated[Path, typer.Argument(help="The directory of a Llama.")],
    directory: Annotated[Path, typer.Argument(help="Where both are written.")],
    times: Times = 10.0,
    right: Right = 0.7,
    threads: Threads = 2,
) -> None:
    """Makes a model that a small one drafts for."""
    found = make(small, directory, times, right, threads)
    typer.echo(f"{directory}: {small.name} says the same in {found:.0%}")


if __name__ == "__main__":
    run(main)
