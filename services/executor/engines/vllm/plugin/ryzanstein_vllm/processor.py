"""A vLLM logits processor that chooses the tokens itself, as a function of logits, parameters, seed and position.

vLLM's own random numbers come from a generator that starts anew with each request, so an answer that is continued as a
new request (prompt + output so far) gets another text. Here the number for a token depends on (seed, position) alone,
and penalties, bad words, `min_tokens` and grammars follow the whole answer, also the part that is prompt to vLLM:

    vLLM's prompt   [ prompt ............. | output of earlier attempts ]    vLLM's output  [ ...... ]
                                           ▲ prompt_tokens                                            ▲ position
    logits ─▶ padding, grammar, allowed tokens and bans: minus infinity
           ─▶ repetition, presence, frequency penalties ─▶ logit bias ─▶ temperature ─▶ exponentials
           ─▶ top-k ─▶ top-p ─▶ min-p ─▶ drawn by numbers keyed by (seed, position) (`draws.py`)
           ─▶ minus infinity but for the chosen token, which vLLM's argmax takes

A request says what it wants in `SamplingParams.extra_args["ryzanstein"]` (`SamplingOptions`); its own sampling
parameters stay neutral, with temperature 0. Requests without it are left alone.

What it needs of vLLM, 0.12 to 0.32:
- The V1 model runner's interface of processors. Versions that prefer the V2 runner need VLLM_USE_V2_MODEL_RUNNER=0:
  with V2 they refuse to start where this processor is named or installed.
- That it is named (`--logits-processors`), where scheduling is asynchronous, as it is by default: the newest output
  token is a placeholder (-1) until just before the next one is sampled, and vLLM replaces it for processors that are
  named, but not for those that are only installed. Positions are right all the same; whatever depends on the tokens
  (penalties, bad words, grammars) ends with a failure at the first placeholder and never goes on without them.
- `--generation-config vllm` where requests come over HTTP: else a model's own defaults stand beside what is asked for.
- No speculative decoding, which vLLM refuses with custom processors.
Named and installed, it is loaded twice: the same tokens, for twice the work.

A row that fails (a grammar that leads nowhere, logits that are not finite) gets a stop token and a line in the log: an
exception in here would end the whole engine. Why is told at `FAILURES`, where somebody listens. Compiling runs in the
engine's own process, so whoever hands in grammars of strangers should ask `check_grammar` before, in a process that may
be lost.
"""

import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .draws import draw, streams_of, uniforms
from .grammars import Grammars, Words, line, load_tokenizer, model_ends
from .rows import Row
from .sampling_options import KEY, SamplingOptions, refuse_outside

try:
    from vllm.v1.sample.logits_processor import LogitsProcessor
except ImportError:  # the functions below are of use without vLLM, too
    LogitsProcessor = object

log = logging.getLogger("vllm.ryzanstein")  # vLLM shows what is logged below its own name

# The address of a datagram socket that is told why requests with an `id` have failed; unset: the log alone is.
FAILURES = "KEYED_SAMPLING_FAILURES"

_INFINITY = float("inf")
_NUCLEUS = 1024  # most likely tokens among which a top-p set is sought before all are sorted
_BY_SCORE = 1024  # the widest top-k that is cut by logits where nothing edits them


class BatchPlan:
    """What stays the same from step to step while the batch does: who is where, and their parameters on the device."""

    def __init__(
        self, rows: Mapping[int, Row], width: int, to: Callable[[Any, Any], Tensor], ends: Sequence[int]
    ) -> None:
        """`to`: an array of a data type, as a tensor on the logits' device."""
        cut: dict[int, list[int]] = {}
        for at, row in rows.items():
            if 0 < row.options.vocab_size < width:
                cut.setdefault(row.options.vocab_size, []).append(at)
        self.padding = [(size, to(places, np.int64)) for size, places in cut.items()]
        self.ended = [(at, self._end(row.options, width, ends)) for at, row in rows.items() if row.problem]
        self.ended_places = to(self.ended or np.zeros((0, 2)), np.int64).T
        working = [
            (at, row) for at, row in rows.items() if not row.problem and (row.options.edits or not row.options.greedy)
        ]
        self.rows = [row for _, row in working]
        self.where = to([at for at, _ in working], np.int64)
        self.drawn_rows = [row for row in self.rows if not row.options.greedy]
        self.drawn = to([at for at, row in enumerate(self.rows) if not row.options.greedy], np.int64)
        self._plan_draws([row.options for row in self.drawn_rows], width, to)
        self._plan_biases([row.options for row in self.rows], width, to)

    def _plan_draws(self, requested: list[SamplingOptions], width: int, to: Callable[[Any, Any], Tensor]) -> None:
        self.streams = streams_of([options.seed for options in requested])
        self.temperature = to([[options.temperature] for options in requested], np.float32)
        limited = [at for at, options in enumerate(requested) if 0 < options.top_k < width]
        self.top_k_rows = to(limited, np.int64)
        self.top_k_ranks = to([[requested[at].top_k - 1] for at in limited], np.int64)
        self.top_k_most = max((requested[at].top_k for at in limited), default=0)
        by_score = [[not requested[at].edits and requested[at].top_k <= _BY_SCORE] for at in limited]
        self.top_k_by_score = to(by_score, np.bool_)
        inner = [at for at, options in enumerate(requested) if options.top_p < 1]
        self.top_p_rows, self.top_p = to(inner, np.int64), to([[requested[at].top_p] for at in inner], np.float64)
        likely = [at for at, options in enumerate(requested) if options.min_p > 0]
        self.min_p_rows, self.min_p = to(likely, np.int64), to([[requested[at].min_p] for at in likely], np.float32)

    def _plan_biases(self, requested: list[SamplingOptions], width: int, to: Callable[[Any, Any], Tensor]) -> None:
        biases = [
            (at, *one) for at, options in enumerate(requested) for one in options.logit_bias.items() if one[0] < width
        ]
        self.bias_places = to([[at for at, _, _ in biases], [token for _, token, _ in biases]], np.int64)
        self.biases = to([amount for _, _, amount in biases], np.float32)

    @staticmethod
    def _end(options: SamplingOptions, width: int, ends: Sequence[int]) -> int:
        return next((token for token in (*options.stop_token_ids, *ends) if token < width), 0)


def filter_weights(probs: Tensor, scores: Tensor, plan: BatchPlan) -> None:
    """Zero for what top-k, top-p and min-p leave out, in this order. What ties with the last of those kept is kept."""
    if plan.top_k_most:
        kept = probs[plan.top_k_rows]
        # Where nothing is edited, logits are compared: they differ where their exponentials have become the same.
        keys = torch.where(plan.top_k_by_score, scores[plan.top_k_rows], kept)
        threshold = keys.topk(plan.top_k_most, dim=-1).values.gather(1, plan.top_k_ranks)
        probs[plan.top_k_rows] = kept.masked_fill_(keys < threshold, 0)
    if len(plan.top_p):
        kept = probs[plan.top_p_rows]
        targets = plan.top_p * kept.sum(dim=-1, keepdim=True, dtype=torch.float64)
        threshold, reached = _last_needed(kept.topk(min(_NUCLEUS, kept.shape[1]), dim=-1).values, targets)
        if kept.shape[1] > _NUCLEUS and not bool(reached.all()):
            threshold, _ = _last_needed(kept.sort(dim=-1, descending=True).values, targets)
        probs[plan.top_p_rows] = kept.masked_fill_(kept < threshold, 0)
    if len(plan.min_p):
        kept = probs[plan.min_p_rows]
        probs[plan.min_p_rows] = kept.masked_fill_(kept < plan.min_p * kept.amax(dim=-1, keepdim=True), 0)


def _last_needed(falling: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """With which value the running sum of each row reaches its target, and whether it does."""
    before = (falling.cumsum(dim=-1, dtype=torch.float64) < targets).sum(dim=-1, keepdim=True)
    last = before.clamp(max=falling.shape[1] - 1)
    return falling.gather(1, last), before == last


def weights_of(scores: Tensor, best: Tensor, plan: BatchPlan) -> Tensor:
    """By which tokens are drawn, those of the rows that are drawn; the likeliest has 1 at most."""
    weights = ((scores - best) / plan.temperature).exp_()
    filter_weights(weights, scores, plan)
    return weights


class KeyedSampling(LogitsProcessor):  # type: ignore[misc]
    """See the module."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        config = vllm_config.model_config
        self._device, self._pin = device, is_pin_memory
        self._ends = model_ends(config)
        self._grammars = Grammars(self._ends, lambda: load_tokenizer(config, self._ends))
        # Of the batch, the rows that something is to be done for: greedy ones without edits are vLLM's.
        self._rows: dict[int, Row] = {}
        self._plan: BatchPlan | None = None  # None: the batch has changed

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError with one sentence, which vLLM makes a 400 of."""
        extra = getattr(sampling_params, "extra_args", None) or {}
        if KEY in extra:
            SamplingOptions.of(extra[KEY])
            refuse_outside(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        self._plan = None
        rows = self._rows
        for at in batch_update.removed:
            rows.pop(at, None)
        for at, params, prompt, output in batch_update.added:
            rows.pop(at, None)  # it may take another's place
            if (row := self._row_of(params, prompt, output)) is not None:
                rows[at] = row
        for source, target, direction in batch_update.moved:
            moved, other = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if other is not None and direction.name == "SWAP":
                rows[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        if not self._rows:
            return logits
        try:
            while not self._choose(logits):  # again without the rows that have failed
                pass
        except Exception as error:
            log.exception("sampling failed; the requests that it was to sample for end")
            for row in self._rows.values():
                if not row.problem:
                    self._fail(row, f"Sampling failed: {line(error)}.")
            self._plan = None
            self._end_failed(self._planned(logits), logits)
        return logits

    def _row_of(self, params: Any, prompt: Sequence[int] | None, output: Sequence[int]) -> Row | None:
        given = (getattr(params, "extra_args", None) or {}).get(KEY)
        if given is None:
            return None
        try:
            row = Row(SamplingOptions.of(given), prompt, output, self._grammars)
        except Exception as error:  # who comes in here has not been asked to validate
            row = Row(SamplingOptions(0, 0), (), (), self._grammars)
            row.problem = line(error)
        if row.problem:
            self._fail(row, row.problem)
        idle = row.options.greedy and not row.options.edits and not row.options.vocab_size and not row.problem
        return None if idle else row

    def _choose(self, logits: Tensor) -> bool:
        """One step, in place. False: rows have failed, and nothing has been chosen."""
        plan = self._planned(logits)
        masks = self._follow(plan, logits.shape[1])
        if self._plan is None:
            return False
        for size, places in plan.padding:
            logits[:, size:].index_fill_(0, places, -_INFINITY)
        self._end_failed(plan, logits)
        if not plan.rows:
            return True
        scores = logits.index_select(0, plan.where).float()
        self._mask(scores, masks)
        self._penalise(scores, plan)
        if len(plan.biases):
            scores[plan.bias_places[0], plan.bias_places[1]] += plan.biases
        best = scores.amax(dim=-1, keepdim=True)
        if not self._finite(best, plan):
            return False
        columns = self._columns(scores, best, plan)
        logits.index_fill_(0, plan.where, -_INFINITY)
        logits[plan.where, columns] = 0.0
        return True

    def _columns(self, scores: Tensor, best: Tensor, plan: BatchPlan) -> Tensor:
        if not plan.drawn_rows:
            return scores.argmax(dim=-1)
        at = self._to(uniforms(plan.streams, [row.position for row in plan.drawn_rows]), np.float64)
        if len(plan.drawn_rows) == len(plan.rows):
            return draw(weights_of(scores, best, plan), at)
        columns = scores.argmax(dim=-1)
        columns[plan.drawn] = draw(weights_of(scores[plan.drawn], best[plan.drawn], plan), at)
        return columns

    def _planned(self, logits: Tensor) -> BatchPlan:
        if self._plan is None:
            self._plan = BatchPlan(self._rows, logits.shape[1], self._to, self._ends)
        return self._plan

    def _follow(self, plan: BatchPlan, width: int) -> dict[int, Words]:
        """Brings the rows up to date with their output: what each may draw, by its place among `plan.rows`."""
        edited = [(at, row) for at, row in enumerate(plan.rows) if row.options.counts or row.options.masks]
        for _, row in edited:
            self._try(row, row.follow)
        guides = [row.guide for _, row in edited if row.guide is not None and not row.problem]
        if waiting := [guide for guide in guides if guide.found is None and not guide.complete]:
            self._grammars.compute(waiting)
        masks = {at: self._try(row, partial(row.mask, width)) for at, row in edited if not row.problem}
        return {at: mask for at, mask in masks.items() if mask is not None}

    def _try(self, row: Row, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:  # whatever it is, it ends this request alone
            self._fail(row, line(error))
            return None

    def _mask(self, scores: Tensor, masks: Mapping[int, Words]) -> None:
        if not masks:
            return
        words = np.zeros((len(masks), (scores.shape[1] + 31) // 32), np.uint32)
        for at, mask in enumerate(masks.values()):
            words[at, : len(mask)] = mask  # shorter where there is padding
        where = self._to(list(masks), np.int64)
        shifts = torch.arange(32, dtype=torch.int32, device=scores.device)
        bits = (self._to(words.view(np.int32), np.int32)[:, :, None] >> shifts) & 1
        out = bits.flatten(1)[:, : scores.shape[1]] == 0
        scores[where] = scores[where].masked_fill_(out, -_INFINITY)

    def _penalise(self, scores: Tensor, plan: BatchPlan) -> None:
        places, amounts = [], []
        for at, row in enumerate(plan.rows):
            if row.counts is not None:
                tokens, times = row.counts.table
                there = tokens < scores.shape[1]
                tokens, times, options = tokens[there], times[there], row.options
                places.append(np.stack((np.full(len(tokens), at), tokens)))
                offsets = options.presence_penalty * (times > 0) + options.frequency_penalty * times
                amounts.append(np.stack((np.full(len(tokens), options.repetition_penalty), offsets)))
        if not places:
            return
        at, tokens = self._to(np.hstack(places), np.int64)
        factor, offset = self._to(np.hstack(amounts), np.float32)
        values = scores[at, tokens]
        scores[at, tokens] = torch.where(values > 0, values / factor, values * factor) - offset

    def _finite(self, best: Tensor, plan: BatchPlan) -> bool:
        finite = torch.isfinite(best)
        if bool(finite.all()):
            return True
        for row, fine in zip(plan.rows, finite.squeeze(1).tolist(), strict=True):
            if not fine:
                self._fail(row, "No token is left to draw, or the model's logits are not finite.")
        return False

    def _fail(self, row: Row, problem: str) -> None:
        row.problem = problem
        self._plan = None
        self._tell(row, problem)
        log.warning("a request with seed %d ends at position %d: %s", row.options.seed, row.position, problem)

    def _tell(self, row: Row, problem: str) -> None:
        """Before vLLM tells of the stop token that the request ends with."""
        address = os.environ.get(FAILURES, "")
        if not address or not row.options.id:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as line:
                line.sendto(json.dumps([row.options.id, problem]).encode(), address)
        except OSError as error:
            log.warning("nobody is told that a request has failed: %s", error)

    def _end_failed(self, plan: BatchPlan, logits: Tensor) -> None:
        if plan.ended:
            logits.index_fill_(0, plan.ended_places[0], -_INFINITY)
            logits[plan.ended_places[0], plan.ended_places[1]] = 0.0

    def _to(self, values: Any, dtype: Any) -> Tensor:
        """On the logits' device, without waiting for it."""
        tensor = torch.from_numpy(np.array(values, dtype))
        return (tensor.pin_memory() if self._pin else tensor).to(self._device, non_blocking=True)
