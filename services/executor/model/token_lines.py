"""Lines that are made of several tokens each, in KV blocks; and what they are made of, in slots.

line    of m tokens, made when the last of them is there, in the block of that token (`Pages.tokens`)
ring    what the last tokens of a sequence give to lines, in its slot: the token of position p in place p modulo
        the length, so that nothing is moved when one comes
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from services.executor.model.attention import keep_lines
from services.executor.model.step_context import DecodeBucket, Int64Array, PrefillChunk, StepContext


class TokenLines:
    """One page layer of lines of `tokens` tokens, each made of the last `span` of them."""

    def __init__(self, page: int, tokens: int, span: int) -> None:
        self.page, self.tokens, self.span = page, tokens, span

    def store(self, step: StepContext, kept: Tensor, given: Tensor, make: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The lines [E, d] that end in this step, once they are stored. `given` [T, width]: what the step's tokens
        give, which goes to `kept` [slots, span, width] too; `make` makes lines of [E, span, width] and int64 [E], the
        positions of the first of their tokens."""
        ends = step.once(("ends", self.tokens, self.span), lambda: _Ends(step, self.tokens, self.span))
        lines = make(ends.tokens_of(kept, given), ends.positions)
        keep_lines(step, self.page, (lines.unsqueeze(0),), slots=ends.slots)
        return lines

    def of_bucket(self, step: StepContext, bucket: DecodeBucket) -> tuple[Tensor, Tensor]:
        """All lines of the sequences of a bucket [n, E, d], and those that their rows do not see, bool [n, E]."""
        found = step.store.gather(self.page, bucket.blocks, bucket.stop - bucket.start)[0, :, 0]
        ends = torch.arange(bucket.mask.shape[-1], device=found.device)[self.tokens - 1 :: self.tokens]
        return found[:, ends // self._tokens_of_a_line(step)], bucket.mask[:, 0, 0, ends] != 0

    def of_rows(self, step: StepContext, rows: slice, made: Tensor) -> tuple[Tensor, Tensor]:
        """The lines of the sequence of `rows` of a chunk [E, d], and those that they do not see, bool [rows, E]; `made`
        are the lines of this step."""
        chunk = next(chunk for chunk in step.prefills(None) if chunk.start <= rows.start < chunk.stop)
        own = slice(rows.start - chunk.start, rows.stop - chunk.start)
        ends, hidden = step.once((self.tokens, chunk.start), lambda: _lines_of(step, chunk, self.tokens))
        if chunk.blocks is None:
            return made[ends], hidden[own]
        found = step.store.gather(self.page, chunk.blocks, 1)[0, 0, 0]
        return found[ends // self._tokens_of_a_line(step)], hidden[own]

    def _tokens_of_a_line(self, step: StepContext) -> int:
        """Tokens of a block for each of its lines."""
        return min(self.tokens, step.store.block_size)


class TokenRing:
    """Where the tokens of a step are in slots that keep the last `size` of a sequence: that of position p in place
    p modulo `size`."""

    def __init__(self, step: StepContext, size: int) -> None:
        self._step, self._size = step, size
        positions = step.positions_on_host
        self._places = step.to_device(positions[: step.num_decodes] % size)
        # Of each piece the places of the tokens before it and of the last ones behind it, the oldest first.
        self._around: list[tuple[Tensor, Tensor]] = []
        for piece in step.recurrent.pieces:
            begin = int(positions[piece.start])
            ends: list[Int64Array] = [(at + np.arange(size)) % size for at in (begin, begin + piece.stop - piece.start)]
            self._around.append((step.to_device(ends[0]), step.to_device(ends[1])))

    def keep(self, kept: Tensor, rows: Tensor) -> list[Tensor]:
        """Puts `rows` [T, width] into `kept` [slots, size, width]. Returns of each piece its rows behind those that
        were kept: [size + rows, width]; of a sequence that begins, the first mean nothing."""
        batch, known = self._step.recurrent, []
        if self._step.num_decodes:
            kept[batch.slots, self._places] = rows[: self._step.num_decodes]
            for source, copy in batch.copies:
                kept[copy] = kept[source]
        for piece, (before, behind) in zip(batch.pieces, self._around, strict=True):
            own = torch.cat((kept[piece.slot, before], rows[piece.start : piece.stop]))
            kept[piece.slot, behind] = own[piece.stop - piece.start :]
            for copy in piece.copies:
                kept[copy] = kept[piece.slot]
            known.append(own)
        return known


def ring_of(step: StepContext, size: int) -> TokenRing:
    return step.once(("ring", size), lambda: TokenRing(step, size))


class _Ends:
    """The tokens of a step at which lines end that are made of `tokens` tokens each, of the last `span` of them."""

    def __init__(self, step: StepContext, tokens: int, span: int) -> None:
        self._step, self._span = step, span
        at = step.positions_on_host
        rows = rows_that_end(step, tokens)
        self.slots = step.slots[step.to_device(rows)]  # int64 [E]: of the last token of each
        self.positions = step.to_device(at[rows] + 1 - tokens)  # int64 [E]: of the first token of each
        alone = rows[rows < step.num_decodes]
        self._alone = step.recurrent.slots[step.to_device(alone)].unsqueeze(1)
        self._order = step.to_device((at[alone, None] + 1 + np.arange(span)) % span)
        self._within = []
        for piece in step.recurrent.pieces:
            ends = rows[(rows >= piece.start) & (rows < piece.stop)] - piece.start
            self._within.append(step.to_device(ends[:, None] + 1 + np.arange(span)))

    def tokens_of(self, kept: Tensor, rows: Tensor) -> Tensor:
        """What the tokens of each line give [E, span, width], of `rows` [T, width] and of those `kept` before."""
        known = ring_of(self._step, self._span).keep(kept, rows)
        parts = [own[within] for own, within in zip(known, self._within, strict=True)]
        return torch.cat((kept[self._alone, self._order], *parts))


def rows_that_end(step: StepContext, tokens: int) -> Int64Array:
    """int64 [E]: the rows of a step at which lines of so many tokens end."""
    rows: Int64Array = np.flatnonzero((step.positions_on_host + 1) % tokens == 0)
    return rows


def _lines_of(step: StepContext, chunk: PrefillChunk, tokens: int) -> tuple[Tensor, Tensor]:
    """Of a chunk's sequence the lines of `tokens` tokens each: int64 [E], which of the keys are the last tokens of
    lines, and bool [rows, E], the lines that rows do not see. Where the chunk is all that it needs, [E] are the lines
    among those of the step."""
    device = step.store.device
    if chunk.blocks is not None:
        assert chunk.mask is not None, "a chunk behind others sees no more than they are"
        ends = ((chunk.key_positions(device) + 1) % tokens == 0).nonzero().squeeze(1)
        return ends, chunk.mask[:, ends] != 0
    rows = rows_that_end(step, tokens)
    own = np.flatnonzero((rows >= chunk.start) & (rows < chunk.stop))
    every = torch.arange(chunk.start, chunk.stop, device=device).unsqueeze(1)
    return step.to_device(own), step.to_device(rows[own]) > every
