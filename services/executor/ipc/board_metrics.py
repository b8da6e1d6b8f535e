"""What a ring tells of its work, for Prometheus: histograms and counters at the end of its board.

    | queried tokens, nanoseconds of communication                    (leader) |
    | queue     | <= 1 ms | <= 2 ms | ... | beyond | sum |               (leader) |
    | prefill   | ...                                                          |
    | decode    | ...                                                          |
    | step      | ...                                                          |
    | batch     | ...                                                          |
    | rank 0: its GPU's UUID, two words | rank 1: ...               (each rank) |

Aligned 64-bit integers with one writer each, as on the rest of the board: an observation is two additions, a
reader needs no message, and one that reads between the two is wrong by one observation for a moment.
"""

from bisect import bisect_left
from enum import IntEnum
from typing import NamedTuple

from shared.service.endpoints import cumulative


class Kind(IntEnum):
    """The histograms."""

    QUEUE = 0
    PREFILL = 1
    DECODE = 2
    STEP = 3
    BATCH = 4


class _Shape(NamedTuple):
    bounds: tuple[float, ...]
    unit: float
    """What one of the sum's integers stands for."""


_WAITS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DECODES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_STEPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0)
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
_NS = 1e-9

SHAPES: dict[Kind, _Shape] = {
    Kind.QUEUE: _Shape(_WAITS, _NS),
    Kind.PREFILL: _Shape(_WAITS, _NS),
    Kind.DECODE: _Shape(_DECODES, _NS),
    Kind.STEP: _Shape(_STEPS, _NS),
    Kind.BATCH: _Shape(_SIZES, 1),
}


class Counter(IntEnum):
    """What is counted since the ring started; `count` adds to it, and `supervisor/metrics.py` shows it."""

    QUERIED_TOKENS = 0
    """Tokens of prompts that were looked up in the KV cache."""
    COMMUNICATION_NS = 1
    """Spent in collectives."""


_BEGINS: dict[Kind, int] = {}
_end = len(Counter)
for _kind, _shape in SHAPES.items():
    _BEGINS[_kind] = _end
    _end += len(_shape.bounds) + 2  # beyond them all, and the sum
_GPUS = _end
_GPU_WORDS = 2


def words_of(ranks: int) -> int:
    """How many words the figures of a ring take."""
    return _GPUS + ranks * _GPU_WORDS


class Histogram(NamedTuple):
    """As Prometheus has it."""

    buckets: list[tuple[str, float]]
    sum: float


class GpuRow:
    """Where a rank says which GPU is its own."""

    def __init__(self, words: memoryview, offset: int) -> None:
        self._words = words
        self._offset = offset

    def write(self, uuid: bytes) -> None:
        """`uuid`: its 16 bytes."""
        for index in range(_GPU_WORDS):
            part = int.from_bytes(uuid[index * 8 : index * 8 + 8], "big", signed=True)
            self._words[self._offset + index] = part

    def read(self) -> bytes:
        """Empty where the rank has no GPU."""
        parts = [self._words[self._offset + index] for index in range(_GPU_WORDS)]
        return b"".join(part.to_bytes(8, "big", signed=True) for part in parts) if any(parts) else b""


class RingFigures:
    """The part of a ring's board that begins at word `offset`."""

    def __init__(self, words: memoryview, offset: int, ranks: int) -> None:
        self._words = words
        self._offset = offset
        self._ranks = ranks
        self._histograms = [
            (shape.bounds, round(1 / shape.unit), offset + _BEGINS[kind]) for kind, shape in SHAPES.items()
        ]

    # --- written by the leader -------------------------------------------------------------------

    def observe(self, kind: Kind, value: float) -> None:
        """`value`: seconds, or sequences."""
        bounds, scale, begin = self._histograms[kind]
        words = self._words
        words[begin + bisect_left(bounds, value)] += 1
        words[begin + len(bounds) + 1] += int(value * scale)

    def count(self, counter: Counter, amount: int = 1) -> None:
        """So much more of it."""
        self._words[self._offset + counter] += amount

    def set_communication(self, seconds: float) -> None:
        """Spent in collectives so far."""
        self._words[self._offset + Counter.COMMUNICATION_NS] = round(seconds * 1e9)

    # --- written by each rank --------------------------------------------------------------------

    def gpu(self, rank: int) -> GpuRow:
        return GpuRow(self._words, self._offset + _GPUS + rank * _GPU_WORDS)

    # --- read by the orchestrator ----------------------------------------------------------------

    def counted(self, counter: Counter) -> int:
        """How much of it there was."""
        return int(self._words[self._offset + counter])

    def histogram(self, kind: Kind) -> Histogram:
        bounds, unit = SHAPES[kind]
        begin = self._offset + _BEGINS[kind]
        end = begin + len(bounds) + 1
        return Histogram(cumulative(bounds, self._words[begin:end].tolist()), self._words[end] * unit)

    @property
    def gpus(self) -> dict[int, bytes]:
        """UUIDs by rank, of those that compute on a GPU."""
        return {rank: uuid for rank in range(self._ranks) if (uuid := self.gpu(rank).read())}
