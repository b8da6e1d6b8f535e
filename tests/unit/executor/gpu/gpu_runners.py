"""Runners as a GPU has them, on the CPU through Triton's interpreter, one or several in a ring."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits
from services.executor.gpu.graphs import Rerun
from services.executor.kv_cache.codecs import Codec
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model.loading.loader import load_config, load_model
from services.executor.worker.backends.gpu_decoder import gpu_runner
from services.executor.worker.runner import ModelRunner, widths_of
from tests.unit.executor.model.ring import BLOCK_SIZE, CPU, NUM_BLOCKS, Script, on_ring
from tests.unit.executor.model.tiny import VARIANTS, make_model

Result = TypeVar("Result")
# One KV head: two ranks have a copy each. Interpreted attention costs most.
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
# Of other numbers than `SMALL`.
HEADS: dict[str, dict[str, Any]] = {
    # Three KV heads: two ranks share one of them.
    "llama": {"tie_word_embeddings": False, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma": {"num_attention_heads": 4},
    "mellum": {"num_hidden_layers": 3},
}
# Prefill, in chunks, and a decode beside them; few tokens, for interpreted kernels take a second for some thousands
# of programs.
STEPS = ({0: 4, 1: 2}, {1: 1, 0: 2, 2: 1})
RING_STEPS = ({0: 3, 1: 1},)  # a chunk and a decode: every rank interprets as many programs as one alone


def small_model(directory: Path, model_type: str, **changes: Any) -> Path:
    window = {"sliding_window": 5} if "sliding_window" in VARIANTS[model_type] else {}  # texts are short
    return make_model(directory, model_type, **{**SMALL, **window, **HEADS.get(model_type, {}), **changes})


def small_script() -> Script:
    """Sequences for `STEPS`."""
    return Script([12, 6, 4])


def runner_of(
    directory: Path,
    collectives: Collectives,
    dtype: torch.dtype = torch.float32,
    codec: Codec | None = None,
    gpu: bool = True,
    limits: StepLimits | None = None,
    device: torch.device = CPU,
    summaries: bool = False,
) -> ModelRunner:
    """`gpu`: with the decoder, else with PyTorch alone; `limits`: with steps that need not be waited for, and graphs,
    or on a CPU what stands for them. Requests may choose what is read, by `summaries` where blocks have some."""
    config = load_config(directory)
    layout = ShardLayout.from_config(config, collectives.world_size, collectives.rank)
    model = load_model(directory, dtype, layout, collectives, device, lambda done, total: None)
    layers = config.num_hidden_layers
    shape = StoreShape.uniform(layers, BLOCK_SIZE, layout.kv_heads.size, layout.head_dim, dtype, (codec,) * layers)
    shape = replace(shape, choosing=tuple(range(layers)))
    shape = shape.with_summaries() if summaries else shape
    store = KvStore(shape, NUM_BLOCKS, device, NUM_BLOCKS if codec else 0)
    if gpu:
        capture = Rerun() if device == CPU else None
        return gpu_runner(model, store, layout, collectives, limits=limits, capture=capture)
    return ModelRunner(model, widths_of(model), store, collectives, device)


class OneAtATime:
    """`Collectives` of threads of which one computes at a time: Triton's interpreter is not made for several."""

    def __init__(self, inner: Collectives, turn: threading.Lock) -> None:
        self._inner, self._turn = inner, turn
        self.rank, self.world_size = inner.rank, inner.world_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return self._while_others_compute(lambda: self._inner.all_reduce(tensor))

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        return self._while_others_compute(lambda: self._inner.gather_to_leader(tensor, widths))

    def barrier(self) -> None:
        self._while_others_compute(self._inner.barrier)

    def close(self) -> None:
        return

    def _while_others_compute(self, meet: Callable[[], Result]) -> Result:
        self._turn.release()
        try:
            return meet()
        finally:
            self._turn.acquire()


def on_gpu_ring(world_size: int, work: Callable[[Collectives], Result]) -> list[Result]:
    """`on_ring`, for kernels that are interpreted."""
    turn = threading.Lock()

    def member(collectives: Collectives) -> Result:
        with turn:
            return work(OneAtATime(collectives, turn))

    return on_ring(world_size, member)
