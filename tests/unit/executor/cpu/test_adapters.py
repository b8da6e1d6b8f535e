"""LoRA adapters in the native kernels, against transformers with each adapter merged into its weights in float32."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.collectives.shared_memory import SharedMemory, make_area
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepPlan, to_bytes
from services.executor.cpu.decoder import NativeDecoder
from services.executor.model.adapters import AdapterTarget, LowRank, targets_of, whole_targets
from services.executor.model.loading.loader import build_split, load_config
from services.executor.native.library import why_not
from services.executor.worker.runner import ModelRunner
from tests.unit.executor.cpu.test_decoder import runner_of
from tests.unit.executor.model.ring import Script
from tests.unit.executor.model.tiny import ALL_EXPERTS, auto_class, make_model

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")

Weights = Mapping[str, LowRank]
LENGTHS = [47, 25, 14, 7]
STEPS: list[dict[int, int]] = [
    {0: 16, 2: 11},
    {2: 1, 0: 16, 1: 7},
    {0: 13, 1: 16},
    {2: 1, 0: 1, 1: 1, 3: 6},
    {3: 1, 2: 1, 0: 1, 1: 1},
]
"""Chunked prefill, decodes and both at once."""
SLOTS = {0: 0, 1: -1, 2: 5, 3: 0}
"""Of each sequence."""
Results = list[tuple[int, int, Tensor]]
"""(sequence, position, its logits)"""


def decoder_of(runner: ModelRunner) -> NativeDecoder:
    assert isinstance(runner._decoder, NativeDecoder)
    return runner._decoder


def drawn(targets: list[AdapterTarget], rank: int, seed: int) -> dict[str, LowRank]:
    """An adapter of the whole model, of this rank or a little less; strong enough to change what is computed."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for number, target in enumerate(targets):
        own = max(1, rank - number % 2)
        copies = (target.experts,) if target.experts else ()
        a = torch.randn(*copies, own, target.inputs, generator=random) / target.inputs**0.5
        b = torch.randn(*copies, target.outputs, own, generator=random) * (0.3 / own**0.5)
        made[target.name] = LowRank(a.bfloat16(), b.bfloat16())
    return made


def cut(weights: Weights, targets: list[AdapterTarget]) -> dict[str, LowRank]:
    """A rank's share."""

    def some(factor: Tensor, dim: int, spans: Any) -> Tensor:
        return factor if spans is None else torch.cat([factor.narrow(dim, a, b - a) for a, b in spans], dim)

    shares = {target.name: target for target in targets}
    return {
        name: LowRank(some(pair.a, -1, shares[name].columns), some(pair.b, -2, shares[name].rows))
        for name, pair in weights.items()
    }


def own_targets(directory: Path, world_size: int, rank: int) -> list[AdapterTarget]:
    config = load_config(directory)
    layout = ShardLayout.from_config(config, world_size, rank)
    return targets_of(build_split(config, torch.bfloat16, layout, SingleRank()))


def merged(directory: Path, weights: Weights | None, sequences: list[list[int]]) -> list[Tensor]:
    """float32 logits of the bf16 weights with an adapter's products added."""
    model = auto_class(load_config(directory)).from_pretrained(
        str(directory), attn_implementation="eager", dtype=torch.bfloat16
    )
    model = model.float()
    parameters = dict(model.named_parameters())
    with torch.inference_mode():
        for name, pair in (weights or {}).items():
            delta = pair.b.float() @ pair.a.float()
            weight = parameters[name if name in parameters else f"{name}.weight"]
            weight += delta if delta.shape == weight.shape else delta.mT
        return [model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


def run(
    runner: ModelRunner, slots: Mapping[int, int] = SLOTS, steps: list[dict[int, int]] = STEPS
) -> Results:
    script = Script(LENGTHS)
    found: Results = []
    for tokens in steps:
        plan, sampled = script.step(tokens)
        logits = runner.forward(with_slots(plan, tokens, slots))
        if logits is not None:
            assert isinstance(logits, Tensor)
            found += [(*place, row) for place, row in zip(sampled, logits, strict=True)]
    return found


def with_slots(plan: StepPlan, tokens: dict[int, int], slots: Mapping[int, int]) -> StepPlan:
    order = sorted(tokens, key=lambda sequence: tokens[sequence] > 1)
    return structs.replace(plan, adapters=to_bytes([slots[sequence] for sequence in order]))


def errors(found: Results, expected: list[list[Tensor]]) -> Tensor:
    """Absolute errors; `expected`: the logits of each sequence, all of them."""
    return torch.cat([row - expected[sequence][position] for sequence, position, row in found]).abs()


def expected_of(directory: Path, adapters: Mapping[int, Weights], slots: Mapping[int, int] = SLOTS) -> Any:
    sequences = Script(LENGTHS).sequences
    by_slot = {slot: merged(directory, adapters.get(slot), sequences) for slot in {*slots.values(), -1}}
    return [by_slot[slots[sequence]][sequence] for sequence in range(len(sequences))], by_slot[-1]


EVERY = {"mixtral": ALL_EXPERTS, "qwen2_moe": ALL_EXPERTS, "deepseek_v2": ALL_EXPERTS}
"""Of few experts, rounding to bf16 would choose others."""


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "phi3", "gemma2", "qwen2_moe", "qwen3_5_text", "qwen3_next", "granitemoehybrid"),
        *("gpt_oss", "gemma4_text", "deepseek_v2", "mixtral"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_of_one_step_have_their_own_adapters(tmp_path: Path, model_type: str, world_size: int) -> None:
    directory = make_model(tmp_path, model_type, head_dim=32, **EVERY.get(model_type, {}))
    whole = whole_targets(load_config(directory))
    adapters = {0: drawn(whole, 16, 1), 5: drawn(whole, 3, 2)}
    expected, plain = expected_of(directory, adapters)
    found, without = on_ring(directory, world_size, adapters)
    assert {sequence for sequence, _, _ in found} == {0, 1, 2, 3}
    ours, theirs = errors(found, expected), errors(without, plain)
    changed = errors(found, plain)
    assert changed.mean() > 10 * ours.mean(), "adapters too weak for the comparison to mean anything"
    assert ours.mean() < 1.6 * theirs.mean()
    assert ours.max() < 3 * theirs.max()


def on_ring(directory: Path, world_size: int, adapters: Mapping[int, Weights]) -> tuple[Results, Results]:
    """What the leader of a ring finds, with adapters and without."""
    area = make_area(world_size, 2)

    def work(rank: int) -> tuple[Results, Results]:
        ring = SharedMemory(area, rank, world_size, lanes=2, timeout=60) if world_size > 1 else None
        runner = runner_of(directory, native=True, collectives=ring)
        own = own_targets(directory, world_size, rank)
        decoder = decoder_of(runner)
        for slot, weights in adapters.items():
            decoder.load(slot, cut(weights, own))
        return run(runner), run(runner, dict.fromkeys(SLOTS, -1))

    with ThreadPoolExecutor(world_size) as pool:
        return next(iter(pool.map(work, range(world_size))))
