"""The next token of every row of a step, from its logits.

Per row, in this order; each stage is skipped where its parameter is off:

    logits ─▶ grammar: what cannot follow is out
           ─▶ repetition, presence, frequency penalties ─▶ logit bias ─▶ bans ─▶ temperature ─▶ exponentials
           ─▶ top-k ─▶ top-p (of what top-k left) ─▶ min-p
           ─▶ inverse of the cumulative distribution at uniform(seed, position)

Top-k, top-p and min-p each keep the tokens at or above a threshold probability, so tokens that tie at the threshold are
all kept, however a device orders them; the draw walks the kept tokens in the order of their ids. So a row's token is a
function of its own logits and parameters, and never of the batch around it, nor of how many ranks the logits come from
(see `sampling/candidates.py`).

Log probabilities are those of the model: log-softmax of the logits before any of the above, the grammar
included, as in OpenAI's API and vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.executor.collectives.base import SingleRank
from services.executor.core.engine import BadLogits, GrammarFailed, SampledToken
from services.executor.core.sampling_state import Mask, SamplingState
from services.executor.sampling.candidates import (
    MOST_CANDIDATES,
    WANT,
    RowChanges,
    RowLogits,
    RowSearch,
    RowTable,
    TorchRows,
    Wants,
    collect,
    threads_for,
)
from services.executor.structured_output import masks_of
from shared.errors import InternalError
from shared.messages import TokenLogprobs

# Most likely tokens among which a top-p set is sought first; a full sort only where it is wider.
_NUCLEUS = 1024
_NOTHING_LEFT = (
    "The answer's format, `allowed_token_ids`, `bad_words` and `min_tokens` together leave no next token; loosen one."
)


def keep_top_k(probs: Tensor, top_k: list[int]) -> None:
    """Keeps each row's k most likely tokens; 0, and the vocabulary or more, keep all."""
    rows = [row for row, k in enumerate(top_k) if 0 < k < probs.shape[1]]
    if not rows:
        return
    ranks = [top_k[row] - 1 for row in rows]
    chosen = torch.tensor(rows, device=probs.device)
    largest = probs[chosen].topk(max(ranks) + 1, dim=-1).values
    threshold = largest.gather(1, torch.tensor(ranks, device=probs.device)[:, None])
    _keep_at_least(probs, chosen, threshold)


def keep_top_p(probs: Tensor, top_p: list[float], totals: Tensor | None = None) -> None:
    """Keeps each row's smallest set of most likely tokens whose share of the whole is at least p
    (nucleus sampling, arXiv:1904.09751). The most likely token always stays; 1 keeps all.

    `totals` (float64 [rows, 1]): what the whole is where `probs` are part of it; where they do not reach
    the share, all of them stay."""
    rows = [row for row, p in enumerate(top_p) if p < 1.0]
    if not rows:
        return
    chosen = torch.tensor(rows, device=probs.device)
    shares = torch.tensor([[top_p[row]] for row in rows], dtype=torch.float64, device=probs.device)
    kept = probs[chosen]
    whole = kept.sum(dim=-1, keepdim=True, dtype=torch.float64) if totals is None else totals[rows]
    _keep_at_least(probs, chosen, _nucleus_threshold(kept, shares * whole))


def keep_min_p(probs: Tensor, min_p: list[float]) -> None:
    """Keeps the tokens at least `min_p` times as likely as the likeliest (arXiv:2407.01082); 0 keeps all."""
    rows = [row for row, p in enumerate(min_p) if p > 0.0]
    if not rows:
        return
    chosen = torch.tensor(rows, device=probs.device)
    shares = torch.tensor([[min_p[row]] for row in rows], dtype=probs.dtype, device=probs.device)
    _keep_at_least(probs, chosen, shares * probs[chosen].amax(dim=-1, keepdim=True))


def _nucleus_threshold(probs: Tensor, targets: Tensor) -> Tensor:
    """Probability [n, 1] of the least likely token in each row's nucleus, whose sum reaches the target [n, 1]."""
    largest = probs.topk(min(_NUCLEUS, probs.shape[1]), dim=-1).values
    threshold, reached = _last_needed(largest, targets)
    wide = (~reached).nonzero()[:, 0]
    if len(wide) and largest.shape[1] < probs.shape[1]:
        threshold[wide], _ = _last_needed(probs[wide].sort(dim=-1, descending=True).values, targets[wide])
    return threshold


def _last_needed(descending: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The value [n, 1] with which the running sum of each row reaches its target, and whether it does [n]."""
    sums = descending.cumsum(dim=-1, dtype=torch.float64)
    before = (sums < targets).sum(dim=-1, keepdim=True)
    last = before.clamp(max=descending.shape[1] - 1)
    return descending.gather(1, last), (before <= last).squeeze(1)


def _keep_at_least(probs: Tensor, rows: Tensor, threshold: Tensor) -> None:
    kept = probs[rows]
    probs[rows] = kept.masked_fill_(kept < threshold, 0.0)


def wants_of(states: Sequence[SamplingState], vocab_size: int) -> Wants:
    """What `collect` is to bring for each row: [R] of `WANT`."""
    return np.array([_want(state, vocab_size) for state in states], WANT)


def _want(state: SamplingState, vocab_size: int) -> tuple[float, ...]:
    count = state.candidates
    if not count:
        return 0, state.params.temperature, state.margin(vocab_size), state.params.top_p
    return count if abs(count) <= MOST_CANDIDATES else 0, 0.0, 0.0, 0.0


class RowKernels(RowSearch, Protocol):
    """What searches rows of logits, and draws from them."""

    def draw(
        self, table: RowTable, chosen: Sequence[int], states: Sequence[SamplingState], changes: RowChanges | None = None
    ) -> list[int]:
        """Columns that are drawn of a table's `chosen` rows, for their states; of greedy ones the first of the largest,
        and -1 where none may be drawn. `changes`: of these rows, for a table of all tokens."""
        ...


class TorchKernels(TorchRows):
    """`RowKernels` by PyTorch, on any device."""

    def draw(
        self, table: RowTable, chosen: Sequence[int], states: Sequence[SamplingState], changes: RowChanges | None = None
    ) -> list[int]:
        copied = table.take(list(chosen))
        if changes is not None:
            at, there = np.nonzero(changes.places < copied.scores.shape[1])
            columns = torch.from_numpy(changes.places[at, there])
            copied.scores[torch.from_numpy(at), columns] = changes.scores[torch.from_numpy(at), torch.from_numpy(there)]
            for row, allowed in enumerate(changes.allowed):
                if allowed is not None:
                    copied.scores[row].masked_fill_(torch.from_numpy(~allowed).to(copied.scores.device), -torch.inf)
            nothing = (copied.scores.amax(dim=-1) == -torch.inf).tolist()
            return [-1 if none else column for none, column in zip(nothing, _choose(copied, states), strict=True)]
        return _choose(copied, states)


class Sampler:
    """Chooses one token per row. Keeps nothing between calls: all state is in the `SamplingState`s."""

    def __init__(self, kernels: RowKernels | None = None) -> None:
        """`kernels`: PyTorch's unless given."""
        self._kernels = kernels or TorchKernels()

    def sample(self, logits: Tensor | RowLogits, states: Sequence[SamplingState]) -> list[SampledToken]:
        """One token per row of `logits`: what `collect` brought for `wants_of(states)`, or the whole
        logits (floating, [R, vocabulary], on any device).

        Does not change `logits` or `states`: the caller advances a state with the token it accepts.
        Raises `BadLogits` (an `InternalError`) when a row's largest logit is NaN or infinite,
        `GrammarFailed` when no token may follow in a row, and `InternalError` when rows and states do not
        agree in number.
        """
        rows = logits.shape[0] if isinstance(logits, Tensor) else logits.count
        if rows != len(states):
            raise InternalError(f"The step gave {rows} rows of logits for {len(states)} sequences.")
        if not states:
            return []
        if isinstance(logits, Tensor):
            found = collect(logits, wants_of(states, logits.shape[1]), SingleRank(), [logits.shape[1]])
            assert found is not None, "this is rank 0"
            logits = found
        bad = np.flatnonzero(~np.isfinite(logits.largest)).tolist()
        if bad:
            raise BadLogits(bad)
        masks = masks_of(states)
        tokens: list[int] = logits.tokens.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        with threads_for(rows):
            for table in logits.tables:
                _sample_table(table, states, masks, tokens, self._kernels)
                logprobs |= _logprobs(table, logits, tokens, states, self._kernels)
        return [SampledToken(token, logprobs.get(row)) for row, token in enumerate(tokens)]


def _sample_table(
    table: RowTable, states: Sequence[SamplingState], masks: Mapping[int, Mask], tokens: list[int], kernels: RowKernels
) -> None:
    """Puts the tokens of the rows that are drawn, or whose logits are edited or masked, into `tokens`."""
    plain, changed = [], []
    for at, row in enumerate(table.rows):
        if states[row].edits_logits or row in masks:
            changed.append(at)
        elif not states[row].greedy:
            plain.append(at)
    _draw_into(tokens, table, plain, states, kernels)
    if not changed:
        return
    of_changed = [states[table.rows[at]] for at in changed]
    if table.ids is None:
        changes = _changes(table, changed, of_changed, masks)
        _draw_into(tokens, table, changed, states, kernels, changes)
    else:
        edited = table.take(changed)
        _edit(edited, of_changed)
        _draw_into(tokens, edited, list(range(len(changed))), states, kernels)


def _draw_into(
    tokens: list[int],
    table: RowTable,
    chosen: list[int],
    states: Sequence[SamplingState],
    kernels: RowKernels,
    changes: RowChanges | None = None,
) -> None:
    if chosen:
        columns = kernels.draw(table, chosen, [states[table.rows[at]] for at in chosen], changes)
        if -1 in columns:
            raise GrammarFailed(
                _NOTHING_LEFT, [table.rows[at] for at, one in zip(chosen, columns, strict=True) if one < 0]
            )
        for at, column in zip(chosen, columns, strict=True):
            tokens[table.rows[at]] = table.token(at, column)


def _changes(
    table: RowTable, chosen: list[int], states: Sequence[SamplingState], masks: Mapping[int, Mask]
) -> RowChanges:
    """Of a table of all tokens: for each of `chosen` what its state does to its logits."""
    ids = [state.edited for state in states]
    vocab_size = table.scores.shape[1]
    padded = np.full((len(ids), max(map(len, ids))), vocab_size, np.int64)
    for row, one in zip(padded, ids, strict=True):
        row[: len(one)] = one
    columns = torch.from_numpy(padded.clip(max=vocab_size - 1))
    rows = [table.rows[at] for at in chosen]
    edited = RowTable(rows, table.scores[torch.tensor(chosen)[:, None], columns].float(), padded)
    _edit(edited, states)
    allowed = [_allowed(state, masks.get(row), vocab_size) for row, state in zip(rows, states, strict=True)]
    return RowChanges(padded, edited.scores, allowed)


def _allowed(state: SamplingState, mask: Mask | None, vocab_size: int) -> Mask | None:
    if state.bans is None or state.bans.allowed is None:
        return mask
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[state.bans.allowed] = True
    return allowed if mask is None else allowed & mask


def _edit(table: RowTable, states: Sequence[SamplingState]) -> None:
    _apply_penalties(table, states)
    _apply_biases(table, states)
    _apply_bans(table, states)


def _choose(table: RowTable, states: Sequence[SamplingState]) -> list[int]:
    drawn = [at for at, state in enumerate(states) if not state.greedy]
    if len(drawn) == len(states):
        return _draw(table, states)
    columns: list[int] = table.scores.argmax(dim=-1).tolist()
    if drawn:
        draws = _draw(table.take(drawn), [states[at] for at in drawn])
        for at, column in zip(drawn, draws, strict=True):
            columns[at] = column
    return columns


def _apply_penalties(table: RowTable, states: Sequence[SamplingState]) -> None:
    """Repetition penalty r (CTRL, arXiv:1909.05858): a positive logit is divided by r, a negative
    one multiplied, for tokens of prompt and output. Then presence and frequency penalties (OpenAI's
    API): minus presence for tokens of the output, minus frequency times their count."""
    rows, columns, factors, offsets = [], [], [], []
    for at, state in enumerate(states):
        if state.counts is None:
            continue
        where, there = table.columns(at, state.counts.ids)
        counts, params = state.counts.counts[there], state.params
        rows.append(np.full(len(counts), at))
        columns.append(where[there])
        factors.append(np.full(len(counts), params.repetition_penalty))
        offsets.append(params.presence_penalty * (counts > 0) + params.frequency_penalty * counts)
    if not rows:
        return
    scores = table.scores
    places = torch.from_numpy(np.stack((np.concatenate(rows), np.concatenate(columns)))).to(scores.device)
    amounts = torch.from_numpy(np.stack((np.concatenate(factors), np.concatenate(offsets))))
    factor, offset = amounts.float().to(scores.device)
    values = scores[places[0], places[1]]
    scores[places[0], places[1]] = torch.where(values > 0, values / factor, values * factor) - offset


def _apply_biases(table: RowTable, states: Sequence[SamplingState]) -> None:
    rows, columns, amounts = [], [], []
    for at, state in enumerate(states):
        if state.biases is None:
            continue
        where, there = table.columns(at, state.biases.tokens)
        columns.append(where[there])
        amounts.append(state.biases.amounts[there])
        rows.append(np.full(len(columns[-1]), at))
    if not rows:
        return
    scores = table.scores
    places = torch.from_numpy(np.stack((np.concatenate(rows), np.concatenate(columns)))).to(scores.device)
    scores[places[0], places[1]] += torch.from_numpy(np.concatenate(amounts)).to(scores.device)


def _apply_bans(table: RowTable, states: Sequence[SamplingState]) -> None:
    """Banned tokens get a logit of minus infinity; those that are not among a row's allowed ones see `_allowed`."""
    scores = table.scores
    for at, state in enumerate(states):
        if state.bans is None:
            continue
        columns, there = table.columns(at, state.bans.banned)
        scores[at, torch.from_numpy(columns[there]).to(scores.device)] = float("-inf")


def weights(table: RowTable, states: Sequence[SamplingState]) -> Tensor:
    """By which the columns of each row are drawn."""
    scores = table.scores
    temperature = torch.tensor([[state.params.temperature] for state in states], device=scores.device)
    # The largest logit is taken off first: the quotient cannot overflow, however small the temperature.
    # Nothing below asks for a sum of 1, and without it a candidate's weight does not depend on the others.
    probs = ((scores - scores.amax(dim=-1, keepdim=True)) / temperature).exp_()
    keep_top_k(probs, [state.params.top_k for state in states])
    keep_top_p(probs, [state.params.top_p for state in states], table.totals)
    keep_min_p(probs, [state.params.min_p for state in states])
    return probs


def _draw(table: RowTable, states: Sequence[SamplingState]) -> list[int]:
    """One column per row, by the inverse of its distribution."""
    probs = weights(table, states)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    uniform = torch.tensor([[state.uniform()] for state in states], dtype=torch.float64, device=probs.device)
    # The first token whose cumulative probability exceeds the target: one that was filtered out adds
    # nothing and is never the first, and the target is always below the total.
    columns = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    drawn: list[int] = columns.squeeze(1).tolist()
    return drawn


def _logprobs(
    table: RowTable, logits: RowLogits, tokens: list[int], states: Sequence[SamplingState], kernels: RowKernels
) -> dict[int, TokenLogprobs]:
    """By row, for the rows that ask: the chosen token's log probability and the most likely ones."""
    asking = np.array([at for at, row in enumerate(table.rows) if states[row].params.logprobs >= 0], np.int64)
    if not len(asking):
        return {}
    rows = [table.rows[at] for at in asking]
    wanted = [states[row].params.logprobs for row in rows]
    if table.ids is None:
        log_sums = kernels.log_sums(table.scores, asking, logits.largest[rows])
    else:
        log_sums = logits.log_sums[rows]
    wants = np.zeros(len(asking), WANT)
    wants["count"] = max([1, *wanted])
    few = kernels.few(table.scores, asking, wants, 0)
    order = np.lexsort((few.ids, -few.values, few.rows))
    starts = np.cumsum(few.lengths) - few.lengths
    chosen = [table.columns(at, np.array([tokens[row]]))[0][0] for at, row in zip(asking, rows, strict=True)]
    own = table.scores[torch.from_numpy(asking), torch.tensor(chosen)].float().cpu().numpy() - log_sums
    found = {}
    for at, (row, count) in enumerate(zip(rows, wanted, strict=True)):
        best = order[starts[at] : starts[at] + count]
        ids = [table.token(asking[at], column) for column in few.ids[best].tolist()]
        values = (few.values[best] - log_sums[at]).tolist()
        found[row] = TokenLogprobs(float(own[at]), list(zip(ids, values, strict=True)))
    return found
