"""LoRA adapters beside the weights of every kind of model: as the models that peft merges them into compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from msgspec import structs

from services.executor.collectives.base import Collectives
from services.executor.core.step_plan import StepPlan, as_int32, to_bytes
from services.executor.model.adapters import AdapterTarget, targets_of
from services.executor.worker.runner import ModelRunner
from tests.unit.executor.model.architectures import settings_of
from tests.unit.executor.model.peft_adapters import base_of, save_adapter, targets_in
from tests.unit.executor.model.ring import Script, make_runner, mixed_script, on_ring
from tests.unit.executor.model.tiny import build, logits_of

RANKS = (4, 9, 16)
"""Of the three adapters."""
OF_SEQUENCES = (1, -1, 2, 0)
"""The slot of each sequence of the script; one has none."""
MODELS = (
    "llama",  # uneven heads
    "qwen3",  # biases, norms of heads
    "gemma2",  # norms behind, caps, windows
    "phi3",  # fused projections
    "gpt2",  # weights the other way
    "mixtral",
    "qwen3_moe",
    "gpt_oss",  # experts the other way, with biases, gate and up in turns
    "deepseek_v2",  # latent attention, shared experts
    "qwen3_next",  # recurrent layers
    "zamba2",
)


@dataclass(frozen=True)
class Adapted:
    """A model with three adapters, and what each sequence of the script comes to with its own."""

    directory: Path
    adapters: list[Path]
    targets: list[AdapterTarget]
    expected: list[torch.Tensor]
    plain: list[torch.Tensor]


def adapted(directory: Path, architecture: str) -> Adapted:
    build(architecture, settings_of(architecture)).save_pretrained(str(directory / "base"))
    base, targets = base_of(directory / "base"), targets_in(directory / "base")
    sequences = mixed_script()[0].sequences
    plain = logits_of(base, sequences)
    adapters, by_slot = [], []
    for slot, rank in enumerate(RANKS):
        adapters.append(directory / f"adapter-{slot}")
        merged = save_adapter(base, adapters[-1], targets, rank, use_rslora=slot == 2)
        by_slot.append(logits_of(merged, sequences))
    expected = [
        plain[sequence] if slot < 0 else by_slot[slot][sequence] for sequence, slot in enumerate(OF_SEQUENCES)
    ]
    return Adapted(directory / "base", adapters, targets, expected, plain)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return adapted(tmp_path_factory.mktemp(request.param), request.param)


def with_slots(plan: StepPlan, script: Script, slots: Sequence[int]) -> StepPlan:
    """`plan` with the slot of each of its sequences, which state slots tell."""
    order = [script.state_slots.index(slot) for slot in as_int32(plan.state_slots).tolist()]
    return structs.replace(plan, adapters=to_bytes([slots[sequence] for sequence in order]))


def runner_of(directory: Path, collectives: Collectives, dtype: torch.dtype = torch.float32) -> ModelRunner:
    runner = make_runner(directory, collectives, dtype)
    runner.serve_adapters(targets_of(runner._model), dtype, 4, 64)
    return runner


def errors(
    model: Adapted, runner: ModelRunner, slots: Sequence[int], loads: list[tuple[int, str]]
) -> dict[tuple[int, int], torch.Tensor]:
    """The logits of the script's steps, the first of which loads."""
    script, steps = mixed_script()
    found = {}
    for index, (plan, sampled) in enumerate(steps):
        plan = with_slots(plan, script, slots)
        logits = runner.forward(structs.replace(plan, adapter_loads=[] if index else loads))
        if logits is not None:
            found.update(zip(sampled, logits, strict=True))
    return found


def loads_of(model: Adapted) -> list[tuple[int, str]]:
    return [(slot, str(path)) for slot, path in enumerate(model.adapters)]


def furthest(found: dict[tuple[int, int], torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((row - expected[sequence][at]).abs().max()) for (sequence, at), row in found.items())


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_of_a_step_use_their_own_adapters(model: Adapted, ranks: int) -> None:
    changed = max(float((a - b).abs().max()) for a, b in zip(model.expected, model.plain, strict=True))
    assert changed > 0.05, "adapters that change nothing prove nothing"
    found = on_ring(
        ranks,
        lambda collectives: errors(
            model, runner_of(model.directory, collectives), OF_SEQUENCES, loads_of(model)
        ),
    )[0]
    assert len(found) > 8
    assert furthest(found, model.expected) < 1e-4
