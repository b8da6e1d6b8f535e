"""An executor that waits to be told what it is, and then says it: `python -m` with the name of this module."""

import json
import os
import socket
import sys
from unittest.mock import Mock

from services.executor.supervisor.ranks import early_fork_server
from services.executor.supervisor.ranks.early_fork_server import StartedForkServer, take_arguments

if __name__ == "__main__":
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    early_fork_server._early.append(StartedForkServer(Mock(), ours))
    take_arguments()
    ours.close()
    asked = theirs.recv(1 << 16).decode()
    said = [sys.argv[1:], os.environ["TOLD"], os.environ["RYZANSTEIN_INSTANCE"], sys.stdin.read(), asked]
    print(json.dumps(said))  # noqa: T201
