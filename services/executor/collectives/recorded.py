"""Collectives that write down what they do, for whoever looks into a ring that hangs in one."""

from collections.abc import Sequence

from torch import Tensor

from services.executor.collectives.base import Collectives
from services.executor.collectives.shared_memory import SharedMemory
from services.executor.core.spans import span
from services.executor.ipc.flight_recorder import Kind, RankRecorder


def recorded(collectives: Collectives, recorder: RankRecorder) -> Collectives:
    """The same collectives. Those in shared memory write themselves, also where native code calls them."""
    if isinstance(collectives, SharedMemory):
        collectives.show(recorder.collective_words)
        return collectives
    return collectives if collectives.world_size == 1 else RecordedCollectives(collectives, recorder)


class RecordedCollectives:
    """`Collectives` over others. On GPUs an operation counts as over when it is queued."""

    def __init__(self, inner: Collectives, recorder: RankRecorder) -> None:
        self._inner = inner
        self._recorder = recorder
        self.rank = inner.rank
        self.world_size = inner.world_size

    @property
    def busy_seconds(self) -> float:
        return self._inner.busy_seconds

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self._recorder.enter(Kind.ALL_REDUCE, tensor.nbytes)
        with span("communicate: all_reduce"):
            result = self._inner.all_reduce(tensor)
        self._recorder.leave()
        return result

    def gather_to_leader(self, tensor: Tensor, widths: Sequence[int]) -> list[Tensor] | None:
        self._recorder.enter(Kind.GATHER, tensor.nbytes)
        with span("communicate: gather"):
            result = self._inner.gather_to_leader(tensor, widths)
        self._recorder.leave()
        return result

    def barrier(self) -> None:
        self._recorder.enter(Kind.BARRIER, 0)
        with span("communicate: barrier"):
            self._inner.barrier()
        self._recorder.leave()

    def close(self) -> None:
        self._inner.close()
