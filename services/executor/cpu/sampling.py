"""Candidates and draws of sampling by the native kernels: one or two passes over a row of logits, where PyTorch makes
copies of all rows time and again (`native/sampling.h`)."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.core.sampling_state import SamplingState
from services.executor.native.library import RzCandidates, RzDraws
from services.executor.sampling.candidates import WANT, Few, Floats, Int64Array, RowChanges, RowTable, Wants, largest_of
from shared.errors import ConfigurationError

_NO_ROOM = "There is no memory for sampling; serve fewer sequences at a time (RYZANSTEIN_MAX_SEQUENCES)."

# Parameters of a row that is drawn; `rz_draw` of `sampling.h`.
_DRAW = np.dtype(
    [
        *((name, "<f8") for name in ("uniform", "total", "top_p")),
        *((name, "<f4") for name in ("temperature", "min_p")),
        ("top_k", "<i4"),
    ],
    align=True,
)
_GREEDY = (0.0, 0.0, 1.0, 1.0, 0.0, 1)  # the first of the largest


def _draw_of(state: SamplingState) -> tuple[float, ...]:
    params = state.params
    return state.uniform(), 0.0, params.top_p, params.temperature, params.min_p, params.top_k


class NativeRows:
    """`RowKernels` on a decoder's threads; copies logits [R, V] that are not contiguous or not float32. One caller at
    a time."""

    def __init__(self, library: Any, handle: int) -> None:
        """`library`: the kernels of the level of the decoder, which is open as long as this is used."""
        self._library, self._handle = library, handle

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, width = logits.shape
        if rows == 1:  # one thread has all of it
            return largest_of(logits)
        values, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self._library.rz_decoder_largest(
            self._handle, logits.data_ptr(), rows, width, values.data_ptr(), tokens.data_ptr()
        )
        return values, tokens

    def few(self, logits: Tensor, rows: Int64Array, wants: Wants, start: int) -> Few:
        return self.near(logits, rows, wants, np.zeros(len(rows), np.float32), start, alone=False)[0]

    def log_sums(self, logits: Tensor, rows: Int64Array, largest: Floats) -> Floats:
        wants = np.array([(0, 1.0, 0.0, 1.0)] * len(rows), WANT)
        totals = self.near(logits, rows, wants, largest, 0, alone=False)[1]
        with np.errstate(divide="ignore"):  # rows of no numbers, which the sampler refuses
            return largest + np.log(totals).astype(np.float32)

    def draw(
        self, table: RowTable, chosen: Sequence[int], states: Sequence[SamplingState], changes: RowChanges | None = None
    ) -> list[int]:
        draws = np.array([_GREEDY if state.greedy else _draw_of(state) for state in states], _DRAW)
        if table.totals is not None:
            draws["total"] = table.totals.numpy()[chosen, 0]
        scores, rows = table.scores.float().contiguous(), np.array(chosen, np.int64)
        columns = np.zeros(len(chosen), np.int64)
        job = RzDraws(
            scores=scores.data_ptr(),
            rows=rows.ctypes.data,
            of=draws.ctypes.data,
            width=scores.shape[1],
            count=len(chosen),
            columns=columns.ctypes.data,
        )
        if changes is not None:
            places, edited = np.ascontiguousarray(changes.places), changes.scores.contiguous()
            job.places, job.edits, job.edited = places.ctypes.data, edited.data_ptr(), places.shape[1]
            width = scores.shape[1]
            assert all(one is None or len(one) == width for one in changes.allowed), "masks are of all tokens"
            masks = np.array([0 if one is None else one.ctypes.data for one in changes.allowed], np.uintp)
            job.allowed = masks.ctypes.data if masks.any() else None
        self._run(self._library.rz_decoder_draw, job)
        found: list[int] = columns.tolist()
        return found

    def near(
        self, logits: Tensor, rows: Int64Array, wants: Wants, largest: Floats, start: int, *, alone: bool
    ) -> tuple[Few, NDArray[np.float64]]:
        """As `RowSearch` has it; of rows with a `count` as `few`, for which nothing need be known of `largest`."""
        count, logits = len(rows), logits.float().contiguous()
        if not count:
            return Few(rows, rows, largest, rows), np.zeros(0)
        bounds, totals = np.zeros(count, np.float32), np.zeros(count)
        lengths, largest, wants = np.zeros(count, np.int64), np.ascontiguousarray(largest), np.ascontiguousarray(wants)
        job = RzCandidates(
            logits=logits.data_ptr(),
            rows=rows.ctypes.data,
            wants=wants.ctypes.data,
            largest=largest.ctypes.data,
            width=logits.shape[1],
            count=count,
            alone=alone,
            bounds=bounds.ctypes.data,
            totals=totals.ctypes.data,
            lengths=lengths.ctypes.data,
        )
        self._run(self._library.rz_decoder_find_candidates, job)
        starts = np.cumsum(lengths) - lengths
        ids, values = np.empty(int(lengths.sum()), np.int64), np.empty(int(lengths.sum()), np.float32)
        job.starts, job.ids, job.values = starts.ctypes.data, ids.ctypes.data, values.ctypes.data
        self._run(self._library.rz_decoder_take_candidates, job)
        ids += start
        return Few(np.repeat(np.arange(count), lengths), ids, values, lengths), totals

    def _run(self, work: Any, job: ctypes.Structure) -> None:
        if work(self._handle, ctypes.byref(job)):
            raise ConfigurationError(_NO_ROOM)
