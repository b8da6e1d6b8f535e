"""How much KV cache the ranks of a ring hold, and of what kind: from the settings and the memory, agreed on by all.

Bytes per block, and blocks per budget:

    writable   every sequence's last block, and what one step fills: as many as the batch may need, no more
    quantized  full blocks, compressed: all the rest of the budget

Where no layer is compressed all blocks are writable. With `kv_mapped_memory` quantized ones lie in a file of that size,
and the budget has beside what is in memory for them (scales, summaries) a window: the pages of a sequence that two
layers read, the one that is computed and the one that is read ahead.

Of a GPU's memory the KV cache may take what is free once the weights are there, less what steps need.

    |<────────────────────────────── total ──────────────────────────────>|
    | weights, NCCL, others' | KV cache            | steps' needs, or     |
    | |<─── not free ───────>|<─────────── free ────| 1 - utilization ────>|
                                                   the larger of the two

Needs are estimated, and generously: a step that finds no memory loses the ring, a tenth more of cache gains little.

What cannot hold one sequence is refused twice: by `check_room` from the configuration and the sizes of the weights,
before these are read, and by `plan_store` once they are there, when the memory is known that is left.
"""

from typing import NamedTuple

import torch

from services.executor.collectives.base import Collectives, of_all_ranks
from services.executor.core.layer_state import (
    LayerStates,
    Pages,
    StateTensor,
    choosing_pages,
    layer_of_pages,
    page_layers,
)
from services.executor.core.settings import ExecutorSettings, layer_dtypes, parse_layers
from services.executor.kv_cache.codecs import AS_COMPUTED, PREFERRED, codecs_of
from services.executor.kv_cache.store_shape import StoreShape, state_bytes
from services.executor.platforms.catalog import platform_of
from shared.data_types import BlockDType
from shared.errors import ConfigurationError

DEFAULT_UTILIZATION = 0.9  # share of a GPU's memory that may be in use once the cache stands
MIB = 1 << 20
# cuBLAS (32 MiB per stream and handle on Hopper), split attention, what NCCL takes later, Triton's kernels.
WORKSPACES = 512 * MIB
# CUDA graphs of a ladder of batch sizes: some 400 nodes each, over one pool of activations.
GRAPHS = 512 * MIB
FRAGMENTS = 1.5  # what PyTorch's allocator reserves for what is allocated, at most


class StepWidths(NamedTuple):
    """What decides how large a step's tensors are on one rank; in values."""

    hidden: int
    attention: int  # of q, k, v and the attention's output together, this rank's
    intermediate: int  # of the MLP, this rank's; of a mixture's, all experts' that a token meets
    vocab: int  # the whole vocabulary
    ranks: int
    experts: int = 0  # that a token goes to, each of which makes hidden values


def widths_of(config: object, ranks: int) -> StepWidths:
    """From a transformers configuration; what it does not name is taken as in Llama. Where layers differ, the last
    one's."""
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[-1]  # type: ignore[attr-defined]
    hidden = _number(config, "hidden_size", 4096)
    heads = _number(config, "num_attention_heads", 32)
    head_dim = _number(config, "head_dim", max(1, hidden // heads))
    kv_heads = _number(config, "num_key_value_heads", heads)
    experts, dense = (_number(config, "num_experts_per_tok", 0), _number(config, "intermediate_size", 4 * hidden))
    intermediate = max(dense, _number(config, "moe_intermediate_size", dense) * max(1, experts))
    return StepWidths(
        hidden,
        -(-2 * (heads + kv_heads) * head_dim // ranks),
        -(-intermediate // ranks),
        _number(config, "vocab_size", 0),
        ranks,
        experts,
    )


def step_bytes(widths: StepWidths, tokens: int, rows: int, dtype: torch.dtype, graphs: int = GRAPHS) -> int:
    """Bytes that a rank may need beside weights and cache, for steps of at most `tokens` that sample at most `rows`;
    `graphs`: what CUDA graphs may take.

    Activations of one layer at a time: the residual, its norm and the products around attention and MLP; of the rows
    that are sampled the rank's logits, and on rank 0 everybody's, twice in float32.
    """
    values = (4 + widths.experts) * widths.hidden + widths.attention + 3 * widths.intermediate
    activations = tokens * values * dtype.itemsize
    logits = rows * (-(-widths.vocab // widths.ranks) * dtype.itemsize + widths.vocab * (dtype.itemsize + 8))
    return int(FRAGMENTS * (activations + logits)) + WORKSPACES + graphs


def gpu_budget(free: int, total: int, needs: int, utilization: float = DEFAULT_UTILIZATION) -> int:
    """Bytes for the cache; `free` of `total` bytes with the weights loaded. Pure."""
    return max(0, int(free - max(needs, (1 - utilization) * total)))


def _number(config: object, name: str, default: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else default


DEFAULT_CPU_SHARE = 0.25  # share of the host's free memory that one rank's cache takes unless a budget is set
DEFAULT_SEQUENCES = 64  # full-length sequences beyond which a CPU cache does not grow unless a budget is set
_KV_MEMORY, _CONTEXT = "RYZANSTEIN_KV_MEMORY (--kv-memory)", "RYZANSTEIN_CONTEXT_LENGTH (--context-length)"
_MAPPED = "RYZANSTEIN_KV_MAPPED_MEMORY (--kv-mapped-memory)"
SPARE_WRITABLE_BLOCKS = 8
# Slots beside those of running sequences, for snapshots that one step makes and the next one moves to blocks.
SNAPSHOT_SLOTS = 8
LEAST_SLOTS = 2  # one sequence's and one for a snapshot
# Share of the budget that slots may take; where all sequences' would take more, fewer run at once.
SLOTS_SHARE = 0.5
# Sequences whose steps may check as many drafts as settings allow at once, where the model keeps recurrent state: the
# state behind each draft is a slot.
DRAFTING_SEQUENCES = 4
DRAFTS_SHARE = 0.125  # share of the budget that these slots may take
# Of a model that keeps recurrent state alone: its blocks are as large as this makes them.
BLOCKS_OF_A_SNAPSHOT = 512
# Beyond which a cache does not grow unless a budget is set: the leader keeps some 100 bytes for each. A large GPU has
# room for more with models below 100 million weights.
MOST_BLOCKS = 1 << 21
# Of one token's keys or values of one head, in one layer: as many as the GPU's kernels can count.
MOST_LINES = (1 << 31) - 1
COPY_BYTES_PER_STEP = 64 << 20  # bytes that one step restores at most: about ten milliseconds of copying
MOST_COPIES_PER_STEP = 256


class BlockCounts(NamedTuple):
    """Blocks of a store: ids [0, writable) and [writable, writable + quantized); and slots for recurrent state."""

    writable: int
    quantized: int
    slots: int = 0
    draft_slots: int = 0  # further ones, for the states behind drafts

    @property
    def all_slots(self) -> int:
        return self.slots + self.draft_slots


def writable_reserve(max_sequences: int, max_batch_tokens: int, block_size: int) -> int:
    """Writable blocks that a step may need at most where full ones are compressed.

    Each sequence writes to a last block and may begin another; the chunks of prompts fill the others.
    """
    return 2 * max_sequences + -(-max_batch_tokens // block_size) + SPARE_WRITABLE_BLOCKS


def plan_blocks(
    shape: StoreShape, context_length: int, budget_bytes: int, reserve: int, cap: int | None = None, slots: int = 0
) -> BlockCounts:
    """What fits in `budget_bytes` beside `slots`; `reserve` as in `writable_reserve`, the rest as in
    `plan_num_blocks`."""
    if not shape.moves_full_blocks:
        size = shape.bytes_per_block
        return BlockCounts(plan_num_blocks(size, shape.block_size, context_length, budget_bytes, cap), 0)
    size, reserved = (shape.bytes_per_quantized_block, slots * shape.slot_bytes + reserve * shape.bytes_per_block)
    quantized = plan_num_blocks(size, shape.block_size, context_length, budget_bytes, cap, reserved)
    return BlockCounts(reserve, quantized, slots)


def plan_mapped_blocks(
    shape: StoreShape, context_length: int, budget_bytes: int, reserve: int, mapped_bytes: int, slots: int = 0
) -> BlockCounts:
    """Blocks of a file of `mapped_bytes`, `MOST_BLOCKS` at most, of which `budget_bytes` of memory hold what does not
    lie there; the rest as in `plan_blocks`. Pure."""
    per_sequence = -(-context_length // shape.block_size)
    quantized = min(mapped_bytes // shape.bytes_per_mapped_block, MOST_BLOCKS)
    if quantized < per_sequence:
        raise ConfigurationError(
            f"{_MAPPED} is {mapped_bytes} bytes, and one sequence of {context_length} tokens takes "
            f"{per_sequence * shape.bytes_per_mapped_block}; set it to that or more, or lower {_CONTEXT}."
        )
    held = slots * shape.slot_bytes + reserve * shape.bytes_per_block
    held += quantized * (shape.bytes_per_quantized_block - shape.bytes_per_mapped_block)
    window = mapped_window(shape, context_length)
    if held + window > budget_bytes:
        raise ConfigurationError(
            f"The KV cache budget of {budget_bytes} bytes of memory is too small for {quantized} KV blocks in a file: "
            f"they need {held} bytes for what is written and for scales, summaries and slots, and {window} for the "
            f"layer that is computed and the one that is read meanwhile; set {_KV_MEMORY} to {held + window} bytes or "
            f"more, or lower {_MAPPED} or {_CONTEXT}."
        )
    return BlockCounts(reserve, quantized, slots)


def mapped_window(shape: StoreShape, context_length: int) -> int:
    """Bytes of one sequence's blocks that two layers read from the file, at most."""
    sizes = sorted(shape.mapped_bytes(page) for page in range(shape.num_layers))
    return -(-context_length // shape.block_size) * sum(sizes[-2:])


def plan_slots(shape: StoreShape, budget_bytes: int, max_sequences: int, blocks_bytes: int = 0) -> int:
    """Slots for the recurrent state of sequences, and for snapshots, within `SLOTS_SHARE` of `budget_bytes`. Pure.
    The blocks of one sequence, `blocks_bytes`, go before slots for many.

    Raises `ConfigurationError` when they do not hold one sequence and one snapshot.
    """
    if not shape.slot_bytes:
        return 0
    most = int(budget_bytes * SLOTS_SHARE) // shape.slot_bytes
    if most < LEAST_SLOTS:
        least = LEAST_SLOTS * shape.slot_bytes
        raise ConfigurationError(
            f"The recurrent state of one sequence takes {shape.slot_bytes} bytes, and {SLOTS_SHARE:.0%} of the KV "
            f"cache budget of {budget_bytes} bytes hold that of {most} sequences where {LEAST_SLOTS} are needed, one "
            f"for a snapshot; set {_KV_MEMORY} to {max(int(least / SLOTS_SHARE), least + blocks_bytes)} bytes or more."
        )
    beside_blocks = max(LEAST_SLOTS, (budget_bytes - blocks_bytes) // shape.slot_bytes)
    return min(most, beside_blocks, max_sequences + SNAPSHOT_SLOTS)


def plan_draft_slots(shape: StoreShape, budget_bytes: int, slots: int, max_drafts: int, blocks_bytes: int = 0) -> int:
    """Slots beside `slots`, within `DRAFTS_SHARE` of `budget_bytes`, for the states behind the drafts of steps, of
    which a sequence has `max_drafts` at most. Pure. Those of sequences, and the blocks of one, `blocks_bytes`, go
    before them: 0 where there is no room."""
    if not slots:
        return 0
    beside = budget_bytes - blocks_bytes - slots * shape.slot_bytes
    room = max(0, min(int(budget_bytes * DRAFTS_SHARE), beside)) // shape.slot_bytes
    return min(room, DRAFTING_SEQUENCES * max_drafts)


def plan_num_blocks(
    bytes_per_block: int,
    block_size: int,
    context_length: int,
    budget_bytes: int,
    cap: int | None = None,
    reserved: int = 0,
) -> int:
    """Blocks that fit in `budget_bytes` less `reserved`, at most enough for `cap` sequences of `context_length` tokens.

    Pure. The ring uses the smallest answer of its ranks. Raises `ConfigurationError` when not even one
    sequence of full length fits.
    """
    per_sequence = -(-context_length // block_size)
    blocks = max(0, budget_bytes - reserved) // bytes_per_block
    if blocks < per_sequence:
        tokens = blocks * block_size
        lower = f", or {_CONTEXT} to {tokens} or less" if tokens else ""
        raise ConfigurationError(
            f"The KV cache budget of {budget_bytes} bytes holds {tokens} tokens, fewer than one sequence of "
            f"{context_length} takes; set {_KV_MEMORY} to {reserved + per_sequence * bytes_per_block} bytes or "
            f"more{lower}."
        )
    return blocks if cap is None else min(blocks, cap * per_sequence)


def most_useful(shape: StoreShape, reserve: int) -> int:
    """Bytes of a cache of as many blocks as can be counted; `reserve` as in `writable_reserve`. Pure."""
    lines = max(pages.rows for pages in shape.pages) * shape.block_size
    blocks = min(MOST_BLOCKS, MOST_LINES // lines)
    if not shape.moves_full_blocks:
        return blocks * shape.bytes_per_block
    return blocks * shape.bytes_per_quantized_block + reserve * shape.bytes_per_block


def default_budget(
    device: torch.device, step_needs: int = 0, utilization: float = DEFAULT_UTILIZATION, weights: int = 0
) -> int:
    """Bytes that one rank's cache may take on `device` when no budget is set, with `weights` bytes yet to be loaded.
    On a GPU: less `step_needs` bytes, and within `utilization` of its memory."""
    platform = platform_of(device)
    free, total = platform.free_memory(device)
    if platform.is_host:
        return max(0, int((free - weights) * DEFAULT_CPU_SHARE))
    return gpu_budget(free - weights, total, step_needs, utilization)


class SpillCounts(NamedTuple):
    """Spill slots: [0, host) in host memory and [host, host + disk) on disk; and how many blocks a step
    may restore from them."""

    host: int
    disk: int
    copies_per_step: int


def plan_spill(shape: StoreShape, host_bytes: int, disk_bytes: int) -> SpillCounts:
    """What fits. Pure. The ring uses the smallest answer of its ranks."""
    size = shape.bytes_per_spilled_block
    copies = min(max(COPY_BYTES_PER_STEP // size, 1), MOST_COPIES_PER_STEP)
    return SpillCounts(host_bytes // size, disk_bytes // size, copies)


GIB = 1 << 30


def plan_store(
    settings: ExecutorSettings,
    states: LayerStates,
    dtype: torch.dtype,
    reads_compressed: bool,
    context: int,
    device: torch.device,
    collectives: Collectives,
    widths: StepWidths | None = None,
    of_draft: LayerStates = (),
) -> tuple[StoreShape, BlockCounts]:
    """What one rank stores of a model whose layers keep `states`, then of its draft model; and the numbers of blocks of
    all. `widths`: of the model, for what steps need on a GPU.

    `--kv-dtype auto` is `PREFERRED` where what computes `reads_compressed` blocks as fast as others or faster, unless
    some rank's budget is too small for the blocks that compression needs besides, or layers differ in shape where the
    platform's kernels read none of such. Raises `ConfigurationError` when one sequence of `context` tokens does not
    fit, or --kv-dtype-layers does not fit the model.
    """
    in_groups = reads_compressed and platform_of(device).reads_groups
    plain = store_shape(settings, AS_COMPUTED, states, dtype, of_draft)
    if (
        settings.kv_dtype == "auto"
        and reads_compressed
        and (platform_of(device).compresses_uneven_layers or _are_uniform(plain, of_draft))
    ):
        shape = store_shape(settings, PREFERRED.name, states, dtype, of_draft, in_groups=in_groups)
        try:
            mine = _my_blocks(shape, context, settings, device, widths)
        except ConfigurationError:
            mine = BlockCounts(0, 0)  # too few, and so for all ranks
        blocks = BlockCounts(*smallest(mine, device, collectives))
        if blocks.writable:
            return shape, blocks
    shape = plain
    if settings.kv_dtype != "auto":
        shape = store_shape(settings, settings.kv_dtype, states, dtype, of_draft, in_groups=in_groups)
    mine = _my_blocks(shape, context, settings, device, widths)
    return shape, BlockCounts(*smallest(mine, device, collectives))


def _are_uniform(shape: StoreShape, of_draft: LayerStates) -> bool:
    """Whether the page layers of a model are alike, and so are those of its draft model behind them."""
    behind = len(page_layers(of_draft))
    own = shape.num_layers - behind
    parts = (shape.part(0, own), shape.part(own, behind))
    return all(part.is_uniform for part in parts if part.pages)


def blocks_of_a_snapshot(shape: StoreShape, device: torch.device, collectives: Collectives) -> int:
    """Full blocks that the bytes of a slot take on the rank that needs the most; 0: there are no slots."""
    mine = -shape.blocks_per_snapshot if shape.slot_bytes else 0
    return -smallest((mine,), device, collectives)[0]


def agree_on_slots(
    shape: StoreShape, settings: ExecutorSettings, device: torch.device, collectives: Collectives
) -> SpillCounts:
    """The smallest numbers of spill slots that any rank can hold."""
    mine = plan_spill(shape, settings.kv_host_memory, settings.kv_disk_memory)
    return SpillCounts(*smallest(mine, device, collectives))


def smallest(mine: tuple[int, ...], device: torch.device, collectives: Collectives) -> list[int]:
    """The smallest of each number over the ranks."""
    found: list[int] = of_all_ranks(torch.tensor(mine, device=device), collectives).amin(0).tolist()
    return found


def store_shape(
    settings: ExecutorSettings,
    kind: BlockDType,
    states: LayerStates,
    dtype: torch.dtype,
    of_draft: LayerStates = (),
    *,
    in_groups: bool = False,
) -> StoreShape:
    """Of a model whose layers keep `states` on this rank, with full blocks of `kind`; then what its draft model's keep
    in the same blocks. `in_groups`: see `StoreShape`."""
    dtypes = layer_dtypes(kind, parse_layers(settings.kv_dtype_layers), len(states))
    codecs = codecs_of([dtypes[layer] for layer in layer_of_pages(states)])
    slot = tuple(state.slot for state in states if state.slot)
    pages = page_layers(states)
    if not pages:
        pages, codecs = (_pages_of_snapshots(slot, settings.block_size, dtype),), (None,)
    is_mapped = settings.kv_mapped_memory > 0
    shape = StoreShape(settings.block_size, dtype, pages, codecs, slot, choosing_pages(states), is_mapped, in_groups)
    shape = shape.with_summaries() if settings.sparse_attention else shape
    return shape.followed_by(page_layers(of_draft), codecs_of([kind])[0])


def _pages_of_snapshots(slot: tuple[tuple[StateTensor, ...], ...], block_size: int, dtype: torch.dtype) -> Pages:
    """What the blocks of a model without attention consist of, so that snapshots of its slots have where to be."""
    size = sum(state_bytes(tensor, dtype) for layer in slot for tensor in layer)
    return Pages(1, 1, -(-size // (BLOCKS_OF_A_SNAPSHOT * block_size * dtype.itemsize)))


def check_room(
    settings: ExecutorSettings,
    states: LayerStates,
    dtype: torch.dtype,
    context: int,
    device: torch.device,
    weights: int,
    widths: StepWidths | None = None,
    of_draft: LayerStates = (),
) -> None:
    """Raises `ConfigurationError` where this rank will not hold one sequence of `context` tokens of a model whose
    layers keep `states`, and of its draft model. Weights of `weights` bytes need not have been read yet."""
    kinds: tuple[BlockDType, ...] = (PREFERRED.name, AS_COMPUTED)
    if settings.kv_dtype != "auto":
        kinds = (settings.kv_dtype,)
    for kind in kinds:
        try:
            _my_blocks(store_shape(settings, kind, states, dtype, of_draft), context, settings, device, widths, weights)
            return
        except ConfigurationError:
            if kind == kinds[-1]:
                raise


def _my_blocks(
    shape: StoreShape,
    context: int,
    settings: ExecutorSettings,
    device: torch.device,
    widths: StepWidths | None,
    weights: int = 0,
) -> BlockCounts:
    """`weights`: bytes of those that are not there yet."""
    reserve = writable_reserve(settings.max_sequences, settings.max_batch_tokens, shape.block_size)
    if settings.kv_memory:
        return _blocks_and_slots(shape, context, settings, settings.kv_memory, reserve)
    # Ranks and groups of one host share its memory; each GPU has its own.
    needs = _step_needs(settings, widths, shape.dtype) if widths is not None else 0
    budget = default_budget(device, needs, settings.gpu_memory_utilization, weights)
    platform = platform_of(device)
    if platform.is_host:
        budget //= settings.ranks_here * settings.replicas_on_host
        return _blocks_and_slots(shape, context, settings, budget, reserve, DEFAULT_SEQUENCES)
    try:
        return _blocks_and_slots(shape, context, settings, budget, reserve, useful=most_useful(shape, reserve))
    except ConfigurationError as error:
        free, total = platform.free_memory(device)
        raise ConfigurationError(
            f"Of the {total / GIB:.1f} GiB of the GPU {max(0, free - weights) / GIB:.1f} are free with the weights "
            f"loaded, and {budget / GIB:.1f} are left for the KV cache, too few for one sequence of {context} tokens; "
            f"lower {_CONTEXT}, let nothing else use the GPU (nvidia-smi), raise --gpu-memory-utilization, or "
            "spread the model over more GPUs with --tp."
        ) from error


def _blocks_and_slots(
    shape: StoreShape,
    context: int,
    settings: ExecutorSettings,
    budget: int,
    reserve: int,
    cap: int | None = None,
    useful: int | None = None,
) -> BlockCounts:
    """What fits in `budget` bytes, of which blocks are worth `useful` at most."""
    sequence = _sequence_bytes(shape, context, reserve)
    slots = plan_slots(shape, budget, settings.max_sequences, sequence)
    of_drafts = plan_draft_slots(shape, budget, slots, settings.max_drafts, sequence)
    held = slots + of_drafts
    if shape.is_mapped:
        found = plan_mapped_blocks(shape, context, budget, reserve, settings.kv_mapped_memory, held)
    else:
        if useful is not None:
            budget = min(budget, useful + held * shape.slot_bytes)
        found = plan_blocks(shape, context, budget, reserve, cap, held)
    return found._replace(slots=slots, draft_slots=of_drafts)


def _sequence_bytes(shape: StoreShape, context: int, reserve: int) -> int:
    """Memory of the blocks that a store of one sequence of `context` tokens has."""
    blocks = -(-context // shape.block_size)
    if shape.is_mapped:
        held = shape.bytes_per_quantized_block - shape.bytes_per_mapped_block
        return blocks * held + reserve * shape.bytes_per_block + mapped_window(shape, context)
    if not shape.moves_full_blocks:
        return blocks * shape.bytes_per_block
    return blocks * shape.bytes_per_quantized_block + reserve * shape.bytes_per_block


def _step_needs(settings: ExecutorSettings, widths: StepWidths, dtype: torch.dtype) -> int:
    """Bytes beside weights and cache; each token of a step is sampled where drafts are checked."""
    tokens = settings.max_batch_tokens
    rows = min(tokens, settings.max_sequences * (1 + settings.max_drafts))
    graphs = 0 if settings.cuda_graphs == "off" else settings.cuda_graphs_memory
    return step_bytes(widths, tokens, rows, dtype, graphs)
