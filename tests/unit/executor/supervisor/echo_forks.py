"""A fork server of ranks that echo what they are told: `python -m tests.unit.executor.supervisor.echo_forks SOCKET`.

ECHO_FORKS in its environment says what is wrong with it: `threads` (it has two), `version` (it is another's), `mute`
(it ends before it says anything).
"""

import os
import socket
import subprocess
import sys
import threading

from services.executor.supervisor.ranks import fork_server
from services.executor.supervisor.ranks.fork_server import ForkServer

FAULT = os.environ.get("ECHO_FORKS", "")


def main(events: int) -> int:
    """A rank: answers each line with it, `who` with its parent, session and process group; `child` starts one."""
    for line in sys.stdin.buffer:
        match line.split():
            case [b"end", code]:
                return int(code)
            case [b"who"]:
                line = f"{os.getppid()} {os.getsid(0)} {os.getpgid(0)}\n".encode()
            case [b"variables"]:
                names = ("OMP_NUM_THREADS", "PATH", "GOMP_SPINCOUNT")
                line = " ".join([os.environ[name] for name in names]).encode() + b"\n"
            case [b"child"]:
                line = f"{subprocess.Popen(['sleep', '600']).pid}\n".encode()
        os.write(events, line)
    return 0


if __name__ == "__main__":
    if FAULT == "mute":
        raise SystemExit(1)
    if FAULT == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if FAULT == "version":
        fork_server.VERSION = "0.0.0-another"  # type: ignore[misc]
    fork_server.MODULES = ("tests.unit.executor.supervisor.echo_forks",)  # type: ignore[assignment]
    fork_server.RANK_MODULE = "tests.unit.executor.supervisor.echo_forks"
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).run()
