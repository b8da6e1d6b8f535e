"""The smallest service there can be, as a process: `python -m tests.example_service`."""

from typing import ClassVar

from shared.config import CommonSettings
from shared.messages import ServiceName
from shared.service import lifecycle
from shared.service.lifecycle import Service


class Example(Service):
    """Does nothing; notes that it was stopped; may be given a fault."""

    name: ClassVar[ServiceName] = "scheduler"
    fault: BaseException | None = None

    async def start(self) -> None:
        self.stopped = False
        if self.fault is not None:
            self.spawn(self._break(self.fault), "break")

    async def stop(self) -> None:
        self.stopped = True

    async def _break(self, fault: BaseException) -> None:
        raise fault


if __name__ == "__main__":
    raise SystemExit(lifecycle.main(Example, CommonSettings, "ryzanstein serve example"))
