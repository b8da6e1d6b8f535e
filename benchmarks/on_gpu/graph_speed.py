"""What CUDA graphs and sampling on the device bring: a decode step launched kernel by kernel against a replay, the
capture of the ladder, and draws from the logits of a large vocabulary."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.on_gpu.bench import Bench, Row
from benchmarks.on_gpu.machine import release, took, wait
from benchmarks.on_gpu.served import decode_plan, served_model
from benchmarks.on_gpu.shapes import BLOCK, LLAMA_8B, TINY, Shape
from services.executor.collectives.base import SingleRank
from services.executor.core.progress import Progress
from services.executor.core.sampling_state import SamplingState
from services.executor.core.sharding import ShardLayout
from services.executor.gpu.decoder import GpuDecoder
from services.executor.gpu.graphs import CudaCapture, Rerun
from services.executor.gpu.sampling import DeviceSampler
from services.executor.gpu.steps import GpuSteps, StepLimits
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from services.executor.model import lowering
from services.executor.sampling.sampler import Sampler
from shared.messages import SamplingParams

MEMORY = 4 << 30
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("greedy", {"temperature": 0.0}),
    ("temperature", {}),
    ("top-p 0.95", {"top_p": 0.95}),
    ("top-k 50, top-p 0.95", {"top_k": 50, "top_p": 0.95}),
)


def run(bench: Bench) -> Iterator[Row]:
    """Rows of `graphs/...`."""
    yield from _steps(bench.device, bench.tiny)
    release(bench.device)  # of the model, which is gone
    yield from _sampling(bench.device, bench.tiny)


def _steps(device: torch.device, tiny: bool) -> Iterator[Row]:
    shape = TINY if tiny else LLAMA_8B
    batches, context = ((1, 2), 20) if tiny else ((1, 8, 32, 128), 1024)
    dtype = torch.float32 if tiny else torch.bfloat16
    decoder, store = _decoder(shape, dtype, device, max(batches) * (context // BLOCK + 1))
    eager = _around(decoder, store, shape, max(batches), context, graphs=False)
    graphed = _around(decoder, store, shape, max(batches), context, graphs=True)
    eager.prepare()  # compiles: what capturing takes does not hold it
    wait(device)
    before, began = _used(device), time.perf_counter()
    graphed.prepare()
    wait(device)
    seconds, memory = time.perf_counter() - began, _used(device) - before
    yield _row("capture/seconds", f"capturing batches of 1 to {max(batches)}", seconds, "s", shape.name)
    yield _row("capture/memory", "memory of these graphs", memory / 2**20, "MiB", shape.name)
    for batch in batches:
        plan = decode_plan(batch, context, store.num_hot, 0)
        spent: dict[str, float] = {}
        for name, steps in (("eager", eager), ("graph", graphed)):
            step = took(lambda: steps.decoder.launch(plan, Progress.unread()), device, 3 if tiny else 40)  # noqa: B023
            spent[name] = step.device
            what = f"decode step of {batch} at {context} tokens, {name}"
            note = f"{step.wall * 1e3:.2f} ms from launch to launch"
            yield _row(f"step/{name}/{batch}", what, step.device * 1e3, "ms", note)
        gain = spent["eager"] / spent["graph"]
        yield _row(f"step/gain/{batch}", f"eager over graph, {batch} sequences", gain, "times")


def _sampling(device: torch.device, tiny: bool) -> Iterator[Row]:
    count, vocabulary = (2, 100) if tiny else (128, 128256)
    random = torch.Generator(device).manual_seed(1)
    logits = torch.randn((count, vocabulary), generator=random, device=device) * 3
    logits = logits.to(torch.bfloat16)
    largest, tokens = logits.max(dim=-1)
    sampler = DeviceSampler(count, vocabulary, device)
    kinds = [
        (name, [SamplingState(SamplingParams(seed=row, **params), [], []) for row in range(count)])
        for name, params in KINDS
    ]
    for name, states in kinds:
        call = took(lambda: sampler.sample(logits, largest, tokens, states), device, 2 if tiny else 40)  # noqa: B023
        what = f"sampling {count} rows of {vocabulary}, {name}"
        note = f"{call.wall * 1e3:.2f} ms from launch to launch"
        yield _row(f"sampling/device/{_key(name)}", what, call.device * 1e3, "ms", note)
    for name, states in kinds:  # after all of the device's: one call may take seconds
        same = _same(sampler, logits, largest, tokens, states)
        host = took(lambda: Sampler().sample(logits, states), device, 1, warm=0)  # noqa: B023
        what = f"sampling {count} rows of {vocabulary}, {name}, on the host, waited for"
        yield _row(
            f"sampling/host/{_key(name)}", what, host.wall * 1e3, "ms", f"{same} of {count} tokens are equal"
        )


def _key(name: str) -> str:
    return name.replace(", ", "+").replace(" ", "-")


def _same(
    sampler: DeviceSampler, logits: Tensor, largest: Tensor, tokens: Tensor, states: list[SamplingState]
) -> int:
    """Tokens that the sampler on the host draws too."""
    found = sampler.sample(logits, largest, tokens, states).wait()
    host = Sampler().sample(logits, states)
    return sum(one.token == other.token for one, other in zip(found, host, strict=True))


def _decoder(
    shape: Shape, dtype: torch.dtype, device: torch.device, blocks: int
) -> tuple[GpuDecoder, KvStore]:
    config = shape.config()
    layout = ShardLayout.from_config(config, 1, 0)
    lowered = lowering.lower(served_model(config, dtype, device), dtype)
    kept = StoreShape.uniform(
        shape.layers, BLOCK, shape.kv_heads, shape.head_dim, dtype, (None,) * shape.layers
    )
    store = KvStore(kept, blocks + 1, device)
    return GpuDecoder(lowered, store, layout, SingleRank()), store


def _around(
    decoder: GpuDecoder, store: KvStore, shape: Shape, most: int, context: int, *, graphs: bool
) -> GpuSteps:
    limits = StepLimits(most, 512, 2 * context, MEMORY if graphs else 0)
    capture = CudaCapture(store.device) if store.device.type == "cuda" else Rerun()
    return GpuSteps(decoder, store, SingleRank(), [shape.vocabulary], limits, capture)


def _used(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _row(key: str, what: str, figure: float, unit: str, note: str = "") -> Row:
    return Row(f"graphs/{key}", what, figure, unit, note=note)
