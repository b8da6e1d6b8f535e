"""A rank of the stub engine on a GPU that is a double: it computes nothing, and its device hangs when it is told to.

`python -m tests.integration.executor.gpu_rank EVENTS_FD`, as the supervisor starts ranks. RYZANSTEIN_TEST_GPU names
a file, which says in one line "EPOCH RANK": all devices of that ring stand still from then on, as in a collective that
one does not come to; the RANK's is lost (below 0: none is).
"""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from services.executor import rank as rank_process
from services.executor.core.engine import SampledToken
from services.executor.core.sampling_state import SamplingState
from services.executor.core.step_plan import StepPlan
from services.executor.ipc.board import RankBoard, RingBoard
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.worker.stub import StubEngine

FAULTS = Path(os.environ["RYZANSTEIN_TEST_GPU"])
spec: RankSpec
told = False  # whether the leader knows of the fault
attach, compute, read_spec = RingBoard.rank, StubEngine.execute, rank_process.read_spec


class AcceleratorError(RuntimeError):
    """As torch's."""


def fault() -> int | None:
    """The rank whose device is lost in a ring that hangs; None in one that does not."""
    epoch, _, lost = FAULTS.read_text().partition(" ")
    return int(lost) if int(epoch) == spec.epoch else None


class Device:
    """`gpu.device_progress.Marks` of a device that has done at once what was launched, until it hangs."""

    capturing = False

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._launched = self._done = 0

    def put(self, number: int) -> None:
        if fault() == self._rank:
            raise AcceleratorError("CUDA error: uncorrectable ECC error encountered")
        self._launched = number

    @property
    def last(self) -> int:
        if fault() is None:
            self._done = self._launched
        return self._done


def on_a_gpu(board: RingBoard, rank: int) -> RankBoard:
    mine = attach(board, rank)
    mine.follow_device(Device(rank)).start()
    return mine


def wait_for_tokens(engine: StubEngine, plan: StepPlan, samples: Sequence[SamplingState]) -> list[SampledToken]:
    """The leader waits for its device, as it must to know the tokens; the other ranks only launch.

    It hangs in the step after the one in which it learns of the fault: that one's plan has reached all ranks after the
    fault, while of this one another rank may have done its part before.
    """
    global told
    if told:
        threading.Event().wait()
    told = fault() is not None
    return compute(engine, plan, samples)


def remember(commands: BinaryIO) -> RankSpec:
    global spec
    spec = read_spec(commands)
    return spec


if __name__ == "__main__":
    RingBoard.rank = on_a_gpu  # type: ignore[method-assign]
    StubEngine.execute = wait_for_tokens  # type: ignore[method-assign]
    rank_process.read_spec = remember
    code = rank_process.main(int(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
