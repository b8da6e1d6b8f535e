"""The GPU's decoder over weights of eight bits, against transformers' modules over the same ones."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU's decoder is tested where Triton is (Linux on x86-64)")

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.gpu.decoder import GpuDecoder
from services.executor.gpu.linear import use_products
from services.executor.kv_cache.capacity import StoreShape
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.kv_cache.store import KvStore
from services.executor.model.loading.loader import load_config, load_model
from services.executor.worker.backend import gpu_runner
from services.executor.worker.runner import ModelRunner, widths_of
from tests.unit.executor.gpu.gpu_runners import on_gpu_ring, small_model, small_script
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("codec", [INT8, FP8], ids=["int8", "fp8"])
def test_logits_are_those_of_the_modules(tmp_path: Path, codec: Codec, world_size: int) -> None:
    directory = small_model(tmp_path, "llama", intermediate_size=128)
    plan, _ = small_script().step({0: 4, 1: 1})

    def logits_of(collectives: Collectives, gpu: bool) -> Tensor | None:
        layout = ShardLayout.from_config(load_config(directory), collectives.world_size, collectives.rank)
        model = load_model(
            directory, torch.bfloat16, layout, collectives, CPU, lambda done, total: None, codec
        )
        store = KvStore(StoreShape(2, BLOCK_SIZE, layout.kv_heads.size, 32, torch.bfloat16), NUM_BLOCKS, CPU)
        if gpu:
            runner = gpu_runner(model, store, layout, collectives)
            assert isinstance(runner._decoder, GpuDecoder)
        else:
            use_products(model)
            runner = ModelRunner(model, widths_of(model), store, collectives, CPU)
        logits = runner.forward(plan)
        assert logits is None or isinstance(logits, Tensor)
        return logits

    ours, theirs = (
        on_gpu_ring(world_size, lambda collectives, gpu=gpu: logits_of(collectives, gpu))[0]  # type: ignore[misc]
        for gpu in (True, False)
    )
    assert ours is not None
    assert theirs is not None
    assert (ours - theirs).abs().mean() < 0.03 * theirs.std()
