"""Models that PyTorch runs with packed weights: what their products leave to others."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.cpu.module_products import use_native_products
from services.executor.model.adapters.targets import targets_of
from services.executor.model.loading.loader import load_config, load_model
from services.executor.model.quantizing import CODECS
from services.executor.native.library import load_library
from tests.unit.executor.model.lanes import in_lanes, natively
from tests.unit.executor.model.ring import CPU, runner_around
from tests.unit.executor.model.test_adapters import OF_SEQUENCES, adapted, computed, loads_of

pytestmark = natively


@pytest.mark.parametrize("architecture", in_lanes(["qwen3_moe", "deepseek_v2"], ["qwen3_moe"]))
def test_adapters_add_to_packed_weights(tmp_path: Path, architecture: str) -> None:
    model = adapted(tmp_path, architecture)
    layout = ShardLayout.from_config(load_config(model.directory), 1, 0)
    how = (torch.bfloat16, layout, SingleRank(), CPU, lambda done, total: None, CODECS["q8_0"])
    loaded = load_model(model.directory, *how)
    targets = targets_of(loaded)
    use_native_products(loaded, load_library(), 2)
    assert not any(held.numel() for name, held in loaded.named_parameters() if name.endswith("_proj"))
    runner = runner_around(loaded, model.directory, SingleRank(), torch.bfloat16)
    runner.serve_adapters(targets, torch.bfloat16, 4, 64)
    found = computed(model, runner, OF_SEQUENCES, loads_of(model))

    def error(expected: list[Tensor]) -> float:
        return float(torch.stack([(row - expected[at][to]).abs().mean() for (at, to), row in found.items()]).mean())

    assert error(model.expected) < 0.3 * error(model.plain)
