"""The next token of every row of a step, from its logits.

Per row, in this order; each stage is skipped where its parameter is off:

    logits ─▶ repetition, presence, frequency penalties ─▶ logit bias ─▶ temperature ─▶ softmax
           ─▶ top-k ─▶ top-p (of what top-k left) ─▶ min-p
           ─▶ inverse of the cumulative distribution at uniform(seed, position)

Top-k, top-p and min-p each keep the tokens at or above a threshold probability, so tokens that tie
at the threshold are all kept; the draw walks the kept tokens in the order of their ids. So a row's
token is a function of its own logits and parameters, and never of the batch around it.

Log probabilities are those of the model: log-softmax of the logits before any of the above, as in
OpenAI's API and vLLM.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.executor.engine.filters import keep_min_p, keep_top_k, keep_top_p
from services.executor.engine.protocol import BadLogits, SampledToken
from services.executor.engine.sampling_state import SamplingState
from shared.errors import InternalError
from shared.messages import TokenLogprobs


class Sampler:
    """Chooses one token per row. Keeps nothing between calls: all state is in the `SamplingState`s."""

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
        """One token per row of `logits` (floating, [R, vocabulary], on any device).

        Does not change `logits` or `states`: the caller advances a state with the token it accepts.
        Raises `BadLogits` (an `InternalError`) when a row's largest logit is NaN or infinite, and
        `InternalError` when rows and states do not agree in number.
        """
        if logits.shape[0] != len(states):
            raise InternalError(
                f"The step gave {logits.shape[0]} rows of logits for {len(states)} sequences."
            )
        if not states:
            return []
        logits = logits.float()
        tokens = _most_likely(logits)
        special = [row for row, state in enumerate(states) if state.edits_logits or not state.greedy]
        if special:
            chosen = _sample_special(_rows(logits, special), [states[row] for row in special])
            for row, token in zip(special, chosen, strict=True):
                tokens[row] = token
        logprobs = _logprobs(logits, tokens, states)
        return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """A copy of some rows of `tensor`."""
    return tensor.index_select(0, torch.tensor(rows, device=tensor.device))


def _most_likely(logits: Tensor) -> list[int]:
    """The most likely token of each row; NaN is larger than everything in `max`, so it shows here."""
    values, tokens = logits.max(dim=-1)
    # Token ids are exact in float64, and one tensor is one transfer from the device.
    packed: list[list[float]] = torch.stack((tokens.double(), values.double())).tolist()
    bad = [row for row, value in enumerate(packed[1]) if not np.isfinite(value)]
    if bad:
        raise BadLogits(bad)
    return [int(token) for token in packed[0]]


def _sample_special(scores: Tensor, states: list[SamplingState]) -> list[int]:
    """Tokens of the rows that are drawn, or whose logits are edited. Overwrites `scores`."""
    _apply_penalties(scores, states)
    _apply_biases(scores, states)
    drawn = [row for row, state in enumerate(states) if not state.greedy]
    if len(drawn) == len(states):
        return _draw(scores, states)
    tokens: list[int] = scores.argmax(dim=-1).tolist()
    if drawn:
        draws = _draw(_rows(scores, drawn), [states[row] for row in drawn])
        for row, token in zip(drawn, draws, strict=True):
            tokens[row] = token
    return tokens


def _apply_penalties(scores: Tensor, states: list[SamplingState]) -> None:
    """Repetition penalty r (CTRL, arXiv:1909.05858): a positive logit is divided by r, a negative
    one multiplied, for tokens of prompt and output. Then presence and frequency penalties (OpenAI's
    API): minus presence for tokens of the output, minus frequency times their count."""
    rows, ids, factors, offsets = [], [], [], []
    for row, state in enumerate(states):
        if state.counts is None:
            continue
        counts, params = state.counts.counts, state.params
        rows.append(np.full(len(counts), row))
        ids.append(state.counts.ids)
        factors.append(np.full(len(counts), params.repetition_penalty))
        offsets.append(params.presence_penalty * (counts > 0) + params.frequency_penalty * counts)
    if not rows:
        return
    where = torch.from_numpy(np.stack((np.concatenate(rows), np.concatenate(ids)))).to(scores.device)
    amounts = torch.from_numpy(np.stack((np.concatenate(factors), np.concatenate(offsets))))
    factor, offset = amounts.float().to(scores.device)
    values = scores[where[0], where[1]]
    scores[where[0], where[1]] = torch.where(values > 0, values / factor, values * factor) - offset


def _apply_biases(scores: Tensor, states: list[SamplingState]) -> None:
    biases = [
        (row, token, bias)
        for row, state in enumerate(states)
        for token, bias in state.params.logit_bias.items()
    ]
    if not biases:
        return
    where = torch.tensor([bias[:2] for bias in biases], device=scores.device).T
    scores[where[0], where[1]] += torch.tensor([bias[2] for bias in biases], device=scores.device)


def _draw(scores: Tensor, states: list[SamplingState]) -> list[int]:
    """One token per row of `scores` [n, vocabulary], by the inverse of its distribution."""
    device = scores.device
    temperature = torch.tensor([[state.params.temperature] for state in states], device=device)
    # The largest logit is taken off first: the quotient cannot overflow, however small the temperature.
    probs = ((scores - scores.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    keep_top_k(probs, [state.params.top_k for state in states])
    keep_top_p(probs, [state.params.top_p for state in states])
    keep_min_p(probs, [state.params.min_p for state in states])
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.tensor([[state.uniform()] for state in states], dtype=torch.float64, device=device)
    # The first token whose cumulative probability exceeds the target: one that was filtered out adds
    # nothing and is never the first, and the target is always below the total.
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    drawn: list[int] = tokens.squeeze(1).tolist()
    return drawn


def _logprobs(logits: Tensor, tokens: list[int], states: Sequence[SamplingState]) -> dict[int, TokenLogprobs]:
    """By row, for the rows that ask: the chosen token's log probability and the most likely ones."""
    rows = [row for row, state in enumerate(states) if state.params.logprobs >= 0]
    if not rows:
        return {}
    wanted = [states[row].params.logprobs for row in rows]
    logprobs = _rows(logits, rows).log_softmax(dim=-1)
    chosen = torch.tensor([[tokens[row]] for row in rows], device=logits.device)
    own: list[float] = logprobs.gather(1, chosen).squeeze(1).tolist()
    top = logprobs.topk(min(max(wanted), logprobs.shape[1]), dim=-1)
    values: list[list[float]] = top.values.tolist()
    ids: list[list[int]] = top.indices.tolist()
    return {
        row: TokenLogprobs(own[i], list(zip(ids[i][:k], values[i][:k], strict=True)))
        for i, (row, k) in enumerate(zip(rows, wanted, strict=True))
    }
