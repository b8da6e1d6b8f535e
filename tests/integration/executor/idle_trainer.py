"""A trainer of two processes that does nothing, and says the other one's process id as its step. Started as
`python -m tests.integration.executor.idle_trainer EVENTS_FD`."""

import subprocess
import sys
import threading

from services.executor.ipc.trainer_pipe import Loaded, TrainerPipe

if __name__ == "__main__":
    pipe = TrainerPipe(sys.stdin.buffer, int(sys.argv[1]))
    pipe.read_spec()
    other = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    fds = (int(sys.argv[1]),)  # as ranks have it
    with subprocess.Popen(other, stdin=subprocess.PIPE, pass_fds=fds) as process:  # which ends with this one
        pipe.listen()
        pipe.send(Loaded(process.pid, 0))
        threading.Event().wait()
