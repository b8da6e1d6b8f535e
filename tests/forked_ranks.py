"""Ranks of an executor that is a fork (`tests/forked.py`) are forks too, of a fork server that has done its imports: a
new Python takes three seconds of work for a rank that computes, and half a second for one of the stub.

The fork server is the product's own, and a fork of the executor before it has done anything. Once it is lost, all is as
it is without tests.
"""

import multiprocessing
import os
import socket
import sys
from unittest.mock import patch

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor import service
from services.executor.supervisor.multinode import node
from services.executor.supervisor.ranks import early_fork_server, fork_server, rank_process
from services.executor.supervisor.ranks.early_fork_server import RUNTIME, StartedForkServer
from services.executor.supervisor.ranks.rank_process import ForkClient

STUB_MODULES = ["services.executor.rank", "services.executor.leader.leader", "services.executor.worker.stub"]


def fork_ranks(*, stub: bool) -> None:
    """In an executor, before it reads its arguments."""
    start_anew = early_fork_server.start

    def start() -> StartedForkServer:
        early_fork_server.start = start_anew
        return _forked(stub)

    early_fork_server.start = start
    if stub:  # whose ranks no fork server is started for
        early_fork_server._early.append(start())
        for module in (service, node):
            patch.object(module, "fork_client", _client).start()


def _client(settings: ExecutorSettings) -> ForkClient:
    variables = rank_process.variables(rank_process.thread_count(settings), settings)
    return ForkClient(variables, early_fork_server.taken())


def _forked(stub: bool) -> StartedForkServer:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(theirs, stub), daemon=True)
        process.start()
    ours.setblocking(False)
    return StartedForkServer(process._popen, ours)  # type: ignore[attr-defined]  # it has what is asked of a Popen


def _serve(line: socket.socket, stub: bool) -> None:
    """In the fork server."""
    os.setsid()
    number = os.dup2(line.detach(), 3)
    os.closerange(number + 1, os.sysconf("SC_OPEN_MAX"))  # the pipe by whose end tests know that the executor has ended
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # multiprocessing's own was another; ranks read theirs
    os.environ.update({**RUNTIME, **os.environ})
    if stub:
        fork_server.prepare = lambda: None
    server = fork_server.ForkServer(socket.socket(fileno=number))
    if server._die_with_executor is not None:
        server._die_with_executor()
    server.run()
