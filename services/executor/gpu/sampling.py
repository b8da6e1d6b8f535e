"""Tokens of a step on the device: the same as `sampling/sampler.py` gives, without waiting for it.

    logits ─▶ largest, its token ─▶ draws of the rows that are not greedy ─▶ tokens ─┬─▶ token ids of the next step
              (a graph has them)    (kernels/sampling.py)                             └─▶ pinned memory, read later

For rows whose logits nobody edits: greedy ones, and those with a temperature, top-k, top-p, min-p and a seed. What
they need of the host is known before their step is computed: the random number is a function of seed and position.
Penalties, biases, bans, grammars and log probabilities are the host's (`SamplingState.needs_host`).

With several ranks each has its span of the vocabulary. The largest of all is found by one sum over the ranks, in which
each fills its own place (`largest_of_ranks`; a graph could hold it, and kernels one by one it is five launches). Rows
that are drawn are gathered to rank 0, which draws; a sum to which the others add 0 tells them the tokens (`tell`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.collectives.base import Collectives, of_all_ranks
from services.executor.core.engine import BadLogits, SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.gpu.kernels import sampling
from services.executor.platforms.base import DeviceEvent
from services.executor.platforms.catalog import platform_of
from services.executor.sampling.candidates import MOST_CANDIDATES

Params = NDArray[np.float64]  # [5, R]: temperature (0: greedy), top-k (0: off), top-p, min-p, uniform


def params_of(states: Sequence[SamplingState], vocab_size: int) -> Params:
    """Of rows that do not need the host."""
    found = np.zeros((sampling.NUM_PARAMS, len(states)))
    for row, state in enumerate(states):
        if not state.greedy:
            params = state.params
            top_k = params.top_k if params.top_k < vocab_size else 0
            found[:, row] = params.temperature, top_k, params.top_p, params.min_p, state.uniform()
    return found


class Pending:
    """Tokens that are on their way to the host."""

    def __init__(self, tokens: Tensor, largest: Tensor, event: DeviceEvent) -> None:
        self._tokens, self._largest, self._event = tokens, largest, event

    def wait(self) -> list[SampledToken]:
        """One per row, once the device has come to them. Raises `BadLogits` for rows whose largest logit is NaN or
        infinite."""
        self._event.synchronize()
        bad = np.flatnonzero(~np.isfinite(self._largest.numpy())).tolist()
        if bad:
            raise BadLogits(bad)
        return [SampledToken(token) for token in self._tokens.tolist()]


class _Turn(NamedTuple):
    """One of two sets of pinned buffers: while the device fills or reads one, the host has the other."""

    params: Tensor
    tokens: Tensor
    largest: Tensor
    copied: DeviceEvent


class DeviceSampler:
    """Samples the rows of one step after another, in one stream; of each step the results must be taken before the
    one after the next."""

    def __init__(self, most_rows: int, vocab_size: int, device: torch.device) -> None:
        """`vocab_size`: columns of the logits that it gets."""
        self._vocab_size = vocab_size
        self._space = sampling.space_for(most_rows, vocab_size, device)
        self._params = torch.zeros(sampling.NUM_PARAMS * most_rows, dtype=torch.float64, device=device)
        # [most rows]: of the last step, by row; what `resolve` puts into the next.
        self.tokens = torch.zeros(most_rows, dtype=torch.int64, device=device)
        pinned: dict[str, Any] = {"pin_memory": device.type == "cuda"}
        self._turns = [
            _Turn(
                torch.zeros(len(self._params), dtype=torch.float64, **pinned),
                torch.zeros(most_rows, dtype=torch.int64, **pinned),
                torch.zeros(most_rows, dtype=torch.float32, **pinned),
                platform_of(device).event(),
            )
            for _ in range(2)
        ]
        self._turn = 0

    def sample(self, logits: Tensor, largest: Tensor, tokens: Tensor, states: Sequence[SamplingState]) -> Pending:
        """Launches the sampling of `logits` [R, vocabulary], bf16 or float32, whose rows' `largest` [R] and their
        `tokens` int64 [R] are known, for `states` [R] that do not need the host; none: `tokens` are what was drawn."""
        count = len(tokens)
        self._turn = 1 - self._turn
        turn = self._turns[self._turn]
        turn.copied.synchronize()  # of two steps ago: its results have been taken
        chosen = self.tokens[:count]
        chosen.copy_(tokens)
        largest = largest.float()
        params = params_of(states, self._vocab_size)
        if params.any():
            self._draw(logits, largest, params, chosen, turn)
        turn.tokens[:count].copy_(chosen, non_blocking=True)
        turn.largest[:count].copy_(largest, non_blocking=True)
        turn.copied.record()
        return Pending(turn.tokens[:count], turn.largest[:count], turn.copied)

    def _draw(self, logits: Tensor, largest: Tensor, params: Params, chosen: Tensor, turn: _Turn) -> None:
        turn.params[: params.size].numpy()[:] = params.ravel()
        on_device = self._params[: params.size]
        on_device.copy_(turn.params[: params.size], non_blocking=True)
        drawn = params[0] > 0
        sampling.draw(
            logits,
            largest,
            on_device,
            chosen,
            self._space,
            MOST_CANDIDATES,
            top_k=bool((params[1] > 0).any()),
            top_p=bool((drawn & (params[2] < 1)).any()),
        )


def resolve(token_ids: Tensor, before: Tensor) -> Tensor:
    """`token_ids` int32 [T] with the tokens that -1 - k stand for: those of row k of the step `before` int64 [R]."""
    rows = (-1 - token_ids).clamp_(min=0)
    return torch.where(token_ids < 0, before.index_select(0, rows).to(token_ids.dtype), token_ids)


def largest_of_ranks(largest: Tensor, tokens: Tensor, collectives: Collectives, start: int) -> tuple[Tensor, Tensor]:
    """(largest of all ranks float32 [R], its token int64 [R]) on every rank, from this rank's and the first token of
    its span. Of those that tie, the smallest token; NaN is the largest.

    A token's id is exact in float32: vocabularies have fewer than 2^24 tokens.
    """
    if collectives.world_size == 1:
        return largest.float(), tokens
    every = of_all_ranks(torch.stack((largest.float(), (tokens + start).float())), collectives)
    values, ranks = every[:, 0].max(dim=0)  # of ranks that tie the first, whose tokens are the smallest
    return values, every[:, 1].gather(0, ranks.unsqueeze(0)).squeeze(0).long()


def tell(tokens: Tensor, collectives: Collectives) -> Tensor:
    """Rank 0's `tokens` int64 [R] on every rank."""
    if collectives.rank:
        tokens = torch.zeros_like(tokens)
    return collectives.all_reduce(tokens.contiguous())
