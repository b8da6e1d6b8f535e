"""Sparse attention in PyTorch: summaries of full blocks, and the blocks that rows choose by them.

    summary of a block     mean and deviation of its keys, as they are kept, by KV head: a line in the block's page
                           layer of summaries (`StoreShape.with_summaries`)
    score for a row        the highest, over the query heads of a KV head, of query · mean + |query| · deviation
    chosen                 the best, of those that tie the earlier (`core/sparse_attention.py` says how many)

Rows attend to what they have chosen by masks: this is what the native kernels are held against, and
no faster than dense attention.
"""

import torch
from torch import Tensor

from services.executor.core.sparse_attention import DEVIATIONS
from services.executor.model.step_context import BlockChoice, PrefillChunk, StepContext


def keep_summaries(step: StepContext, page: int) -> None:
    """Writes the summaries of the blocks of page layer `page` that the step has filled, where the store keeps any."""
    summary = step.store.shape.summary_of(page)
    if summary is None:
        return
    written, kept = step.filled
    if not len(kept):
        return
    size = step.store.block_size
    keys = step.store.gather(page, kept, 1)[0, 0].float()  # [heads, blocks * size, width]
    keys = keys.view(keys.shape[0], len(kept), size, -1)
    mean = keys.mean(2, keepdim=True)
    deviation = (keys - mean).square().mean(2).sqrt()
    lines = (mean.squeeze(2).transpose(0, 1), deviation.transpose(0, 1))  # [blocks, heads, width]
    dtype = step.store.shape.dtype
    step.store.write(summary, written * size, *(line.to(dtype) for line in lines))
    if step.compressions is not None:
        step.store.compress_layer(summary, *step.compressions)


def choose(step: StepContext, page: int, layer: int, query: Tensor) -> BlockChoice:
    """What the rows of a step read in page layer `page` of layer `layer`.

    `query` [T, kv heads, group, d]; the step's keys, and summaries, are written.
    """
    decodes = []
    batch = step.decodes(None)
    for bucket in batch.buckets:
        own = batch.rows_of(bucket, query.device).tolist()
        blocks = bucket.mask.shape[-1] // step.store.block_size
        read = torch.stack([_read_by(step, page, layer, row, row, query[row], blocks) for row in own])
        decodes.append(read.repeat_interleave(step.store.block_size, dim=-1))
    chunks = step.prefills(None)
    prefills = [
        _of_chunk(step, page, layer, step.num_decodes + index, chunk, query) for index, chunk in enumerate(chunks)
    ]
    return BlockChoice(decodes, prefills)


def _of_chunk(
    step: StepContext, page: int, layer: int, sequence: int, chunk: PrefillChunk, query: Tensor
) -> tuple[Tensor, Tensor]:
    """As `BlockChoice.prefills`."""
    blocks = chunk.key_positions(query.device).div(step.store.block_size, rounding_mode="floor")
    count = int(blocks.max()) + 1
    rows = range(chunk.start, chunk.stop)
    read = [_read_by(step, page, layer, sequence, row, query[row], count) for row in rows]
    return torch.stack(read, dim=1), blocks


def _read_by(step: StepContext, page: int, layer: int, sequence: int, row: int, query: Tensor, blocks: int) -> Tensor:
    """bool [kv heads, blocks]: of the sequence's first `blocks` blocks those that row `row` of the step reads, of
    those that it sees. `query` [kv heads, group, d]."""
    position, size = int(step.positions_on_host[row]), step.store.block_size
    choice = step.choice_of(sequence)
    reading = choice.reading(position, size) if layer >= choice.dense_layers else None
    read = torch.ones((query.shape[0], blocks), dtype=torch.bool, device=query.device)
    if reading is None:
        return read
    first, recent, top = reading
    read[:, first:recent] = False
    if top:
        read[:, first:recent] = _best(step, page, step.table_of(sequence)[first:recent], query, top)
    return read


def _best(step: StepContext, page: int, table: Tensor, query: Tensor, top: int) -> Tensor:
    """bool [kv heads, n]: the `top` blocks of `table` int64 [n] that score best for each KV head."""
    summary = step.store.shape.summary_of(page)
    assert summary is not None, "admission refuses what needs summaries where there are none"
    width = query.shape[-1]
    mean, deviation = step.store.gather(summary, table, 1)[:, 0, ..., :width].float()  # [kv heads, n, d] each
    rows = query.float()
    scores = (rows @ mean.mT + DEVIATIONS * (rows.abs() @ deviation.mT)).amax(1)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, torch.ones_like(order, dtype=torch.bool))
