"""The trainer of a simulated fine-tuning job: the product's stub trainer, as a process of the world.

Its adapter follows from the job and its steps alone, whatever it was interrupted by.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.trainer_pipe import PAUSE, TrainerEvent, TrainerFailed, TrainerSpec
from services.executor.supervisor.trainings.trainer_process import TrainerProcess
from services.executor.training.stub import ALONE, StubTrainer
from shared.errors import InternalError
from tests.simulation.deployment.children import Child, Ended, Family


class Pipe:
    """The trainer's end of the pipe to its host, as `TrainerPipe`, without its thread."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pause = asyncio.Event()
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    def send(self, event: TrainerEvent) -> None:
        self._child.tell(msgspec.json.encode(event) + b"\n")

    async def _listen(self) -> None:
        async for line in self._child.commands:
            if line == PAUSE:
                self.pause.set()
        self._child.exit(1)


async def train(child: Child) -> int:
    """`services.executor.training.stub` in a process of the world. Its exit code."""
    spec = msgspec.json.decode(await child.commands.readline(), type=TrainerSpec)
    pipe: Any = Pipe(child)
    if spec.job.hyperparameters.replicas > 1:
        pipe.send(ALONE)
        return 1
    trainer = StubTrainer(spec, pipe)
    life = trainer.life()
    try:
        with contextlib.suppress(StopIteration):
            next(life)
            while True:
                life.send(not await _paused(pipe, trainer.seconds))
    except Exception as error:
        pipe.send(TrainerFailed(InternalError.code, f"The stub trainer has failed: {error}."))
        return 1
    return 0


async def _paused(pipe: Pipe, within: float) -> bool:
    try:
        await asyncio.wait_for(pipe.pause.wait(), within)
    except TimeoutError:
        return False
    return True


class Trainer(TrainerProcess):
    """As its host sees it. It has no process group that could be signalled."""

    def kill(self) -> None:
        self._process.kill()

    def _signal(self, number: int) -> None:
        self._process.send_signal(number)


class Trainers:
    """Starts them, on the host of the supervisor in whose process it is made."""

    def __init__(self, family: Family) -> None:
        self._family = family

    async def start(
        self, spec: TrainerSpec, settings: ExecutorSettings, variables: Mapping[str, str]
    ) -> TrainerProcess:
        """As `TrainerProcess.start`."""
        child = self._family.start("trainer", train)
        process: Any = child
        started = Trainer(process, child.events, Ended())
        started.tell(msgspec.json.encode(spec) + b"\n")
        return started
