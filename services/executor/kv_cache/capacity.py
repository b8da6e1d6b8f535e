"""How much KV cache the ranks of a ring hold, and of what kind: from the settings and the memory, agreed by all."""

import torch

from services.executor.collectives.base import Collectives
from services.executor.core.setting_values import BlockDType, layer_dtypes, parse_layers
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.kv_cache import sizes
from services.executor.kv_cache.codecs import codecs_of
from services.executor.kv_cache.sizes import (
    DEFAULT_SEQUENCES,
    BlockCounts,
    SpillCounts,
    StepWidths,
    StoreShape,
    default_budget,
    hot_reserve,
    most_useful,
    plan_blocks,
    plan_spill,
    step_bytes,
)
from shared.errors import ConfigurationError

GIB = 1 << 30


def plan_store(
    settings: ExecutorSettings,
    num_layers: int,
    layout: ShardLayout,
    dtype: torch.dtype,
    reads_compressed: bool,
    context: int,
    device: torch.device,
    collectives: Collectives,
    widths: StepWidths | None = None,
) -> tuple[StoreShape, BlockCounts]:
    """What one rank stores, and the numbers of blocks of all. `widths`: of the model, for what steps need on a GPU.

    `--kv-dtype auto` is int8 where what computes `reads_compressed` blocks as fast as others or faster, unless
    some rank's budget is too small for the blocks that compression needs besides; on GPUs too, where fp8 is read as
    fast and takes as many bytes, but is coarser (ADR 0009). Raises `ConfigurationError` when one sequence of
    `context` tokens does not fit, or --kv-dtype-layers does not fit the model.
    """
    if settings.kv_dtype == "auto" and reads_compressed:
        shape = _store_shape(settings, "int8", num_layers, layout, dtype)
        blocks = _agreed(shape, context, settings, device, collectives, widths)
        if blocks.hot:
            return shape, blocks
    kind = "bf16" if settings.kv_dtype == "auto" else settings.kv_dtype
    shape = _store_shape(settings, kind, num_layers, layout, dtype)
    mine = _my_blocks(shape, context, settings, device, widths)
    return shape, BlockCounts(*smallest(mine, device, collectives))


def _agreed(
    shape: StoreShape,
    context: int,
    settings: ExecutorSettings,
    device: torch.device,
    collectives: Collectives,
    widths: StepWidths | None,
) -> BlockCounts:
    """The smallest numbers of blocks that any rank can hold; none where that is too few on some rank."""
    try:
        mine = _my_blocks(shape, context, settings, device, widths)
    except ConfigurationError:
        mine = BlockCounts(0, 0)
    return BlockCounts(*smallest(mine, device, collectives))


def agree_on_slots(
    shape: StoreShape, settings: ExecutorSettings, device: torch.device, collectives: Collectives
) -> SpillCounts:
    """The smallest numbers of spill slots that any rank can hold."""
    mine = plan_spill(shape, settings.kv_host_memory, settings.kv_disk_memory)
    return SpillCounts(*smallest(mine, device, collectives))


def smallest(mine: tuple[int, ...], device: torch.device, collectives: Collectives) -> list[int]:
    """The smallest of each number over the ranks."""
    counts = torch.zeros((collectives.world_size, len(mine)), dtype=torch.int64, device=device)
    counts[collectives.rank] = torch.tensor(mine, device=device)
    found: list[int] = collectives.all_reduce(counts).amin(0).tolist()
    return found


def _store_shape(
    settings: ExecutorSettings, kind: BlockDType, num_layers: int, layout: ShardLayout, dtype: torch.dtype
) -> StoreShape:
    dtypes = layer_dtypes(kind, parse_layers(settings.kv_dtype_layers), num_layers)
    return StoreShape(
        num_layers, settings.block_size, layout.kv_heads.size, layout.head_dim, dtype, codecs_of(dtypes)
    )


def _my_blocks(
    shape: StoreShape,
    context: int,
    settings: ExecutorSettings,
    device: torch.device,
    widths: StepWidths | None,
) -> BlockCounts:
    """What this rank can hold."""
    if settings.kv_memory:
        budget, cap = settings.kv_memory, None
    else:
        # Ranks and groups of one host share its memory; each GPU has its own.
        on_host = settings.ranks_here * settings.replicas_on_host
        ranks_sharing = on_host if device.type == "cpu" else 1
        needs = _step_needs(settings, widths, shape.dtype) if widths is not None else 0
        budget = default_budget(device, needs, settings.gpu_memory_utilization) // ranks_sharing
        cap = DEFAULT_SEQUENCES if device.type == "cpu" else None
    reserve = hot_reserve(settings.max_sequences, settings.max_batch_tokens, shape.block_size)
    if device.type != "cuda" or settings.kv_memory:
        return plan_blocks(shape, context, budget, reserve, cap)
    try:
        return plan_blocks(shape, context, min(budget, most_useful(shape, reserve)), reserve, cap)
    except ConfigurationError as error:
        free, total = sizes.free_memory(device)
        raise ConfigurationError(
            f"Of the {total / GIB:.1f} GiB of the GPU {free / GIB:.1f} are free with the weights loaded, and "
            f"{budget / GIB:.1f} are left for the KV cache, too few for one sequence of {context} tokens; lower "
            "--context-length, let nothing else use the GPU (nvidia-smi), raise --gpu-memory-utilization, or spread "
            "the model over more GPUs with --tp."
        ) from error


def _step_needs(settings: ExecutorSettings, widths: StepWidths, dtype: torch.dtype) -> int:
    """Bytes beside weights and cache; each token of a step is sampled where drafts are checked."""
    tokens = settings.max_batch_tokens
    rows = min(tokens, settings.max_sequences * (1 + settings.max_drafts))
    graphs = settings.cuda_graphs_memory if settings.cuda_graphs == "auto" else 0
    return step_bytes(widths, tokens, rows, dtype, graphs)
