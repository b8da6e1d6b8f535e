"""A stub trainer of which two train a job together: they wait for each other before every step. Started as
`python -m tests.integration.executor.parted_trainer EVENTS_FD`."""

import os
import socket
import sys

from services.executor.ipc.trainer_pipe import Met, TrainerFailed, TrainerPipe, TrainerSpec
from services.executor.training.stub import StubTrainer
from shared.errors import Unavailable


class PartedTrainer(StubTrainer):
    def __init__(self, spec: TrainerSpec, pipe: TrainerPipe) -> None:
        super().__init__(spec, pipe)
        if spec.replica:
            host, _, port = spec.store.rpartition(":")
            self._other = socket.create_connection((host, int(port)))
            self._other.sendall(spec.secret.encode())
        else:
            listener = socket.create_server(("127.0.0.1", 0))
            self.tell(Met(f"127.0.0.1:{listener.getsockname()[1]}"))
            self._other, _ = listener.accept()
            assert self._receive(len(spec.secret)) == spec.secret.encode()

    def _wait(self) -> bool:
        goes_on = super()._wait()
        if goes_on:
            self._other.sendall(b".")
            if not self._other.recv(1):
                raise ConnectionError("it has closed the connection")
        return goes_on

    def _receive(self, size: int) -> bytes:
        return self._other.recv(size, socket.MSG_WAITALL)


def main(events_fd: int) -> int:
    pipe = TrainerPipe(sys.stdin.buffer, events_fd)
    spec = pipe.read_spec()
    pipe.listen()
    try:
        PartedTrainer(spec, pipe).run()
    except OSError as error:
        pipe.send(TrainerFailed(Unavailable.code, f"Another replica of the job is gone: {error}."))
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1])))
