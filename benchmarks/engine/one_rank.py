"""A model on one rank of this process, as the executor has it: what the engine's benchmarks step."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from services.executor.supervisor.rank_process import SPIN_COUNT

if TYPE_CHECKING:
    from services.executor.core.settings import BlockDType
    from services.executor.kv_cache.store import KvStore
    from services.executor.worker.runner import ModelRunner

BLOCK = 16


def load_one_rank(
    directory: Path, dtype_name: str, threads: int, num_blocks: int, kind: "BlockDType" = "bf16"
) -> "tuple[ModelRunner, KvStore]":
    """A runner and its store of `num_blocks` hot blocks, and as many cold ones unless `kind` is bf16.

    `dtype_name`: bf16 or fp32.
    """
    # OpenMP reads its settings when torch is imported; they are the executor's.
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import torch

    from services.executor.collectives.base import SingleRank
    from services.executor.core.sharding import ShardLayout
    from services.executor.kv_cache.capacity import StoreShape
    from services.executor.kv_cache.codecs import codecs_of
    from services.executor.kv_cache.store import KvStore
    from services.executor.model.loading.loader import load_config, load_model
    from services.executor.worker.backend import make_runner

    torch.set_num_threads(threads)
    device, dtype = torch.device("cpu"), {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
    config = load_config(directory)
    layers = config.num_hidden_layers
    layout = ShardLayout.from_config(config, 1, 0)
    model = load_model(directory, dtype, layout, SingleRank(), device, lambda done, total: None)
    codecs = codecs_of([kind] * layers)
    shape = StoreShape(layers, BLOCK, layout.kv_heads.size, layout.head_dim, dtype, codecs)
    store = KvStore(shape, num_blocks, device, 0 if kind == "bf16" else num_blocks)
    return make_runner(model, store, layout, SingleRank(), device, threads), store
