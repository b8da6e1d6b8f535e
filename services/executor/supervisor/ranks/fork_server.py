"""A process that has done a rank's imports and forks ranks: `python -m` this module, with a descriptor.

    executor ──socket──▶ fork server ──fork──▶ child ──fork──▶ rank      the child ends at once, and the rank becomes
             ◀──pid of the rank──┘                                       the executor's: it outlives the fork server

A rank that is forked starts in milliseconds where one that imports PyTorch takes seconds, and shares the memory of what
was imported with the others. Forking is safe as long as there is one thread and no GPU has been touched: that is looked
at before every fork, and said where it does not hold. Nothing of a model is ever loaded here.
"""

import array
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from services.executor.core.torch_imports import import_rest, import_torch
from services.executor.core.transformers_imports import import_transformers
from shared.process import VERSION, die_with_parent

MODULE = "services.executor.supervisor.ranks.fork_server"
RANK_MODULE = "services.executor.rank"
# What every rank of the torch engine needs. Neither starts threads nor touches GPUs.
MODULES = (RANK_MODULE, "services.executor.leader.leader", "services.executor.worker.engine")
LONGEST_MESSAGE = 1 << 16
_ADOPTED_WITHIN = 10.0  # seconds until a rank is the executor's child
_IMPORTABLE = ("services.executor.", "transformers.")


class Fork(msgspec.Struct, frozen=True, tag="fork"):
    """Comes with four descriptors: the rank's standard input, where it tells events, standard output and error."""

    variables: dict[str, str]  # of the rank's environment, where ours does not have them
    own: dict[str, str] = {}  # of its environment, whatever ours has


class ImportModules(msgspec.Struct, frozen=True, tag="import"):
    """Ranks to come will need these modules too. There is no answer."""

    modules: list[str]


class ForkServerReady(msgspec.Struct, frozen=True, tag="hello"):
    """The imports are done."""

    version: str


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    pid: int


class ForkRefused(msgspec.Struct, frozen=True, tag="refused"):
    """This process must not be forked, or cannot be."""

    reason: str


_requests = msgspec.json.Decoder(Fork | ImportModules)


def why_not_to_fork() -> str:
    """Why a fork of this process would not be sound; empty where it is."""
    threads = len([*Path("/proc/self/task").iterdir()])
    if threads > 1:
        return f"it has {threads} threads"
    for open_file in Path("/proc/self/fd").iterdir():
        try:
            target = str(open_file.readlink())
        except OSError:  # the directory itself
            continue
        if target.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd")):
            return f"it has touched a GPU ({target})"
    return ""


def prepare() -> None:
    """The imports of every rank."""
    _load(["shared.lean_imports"])
    import_torch()
    _load(MODULES)


def prepare_to_build(modules: Iterable[str]) -> None:
    """The imports of ranks that make models of files, `modules` among them."""
    import_transformers()
    _load(modules)
    import_rest()


def _load(modules: Iterable[str]) -> None:
    gc.disable()  # what imports make stays: looking for garbage takes a seventh of their time
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        gc.enable()
    # Neither looked through nor moved by the collector, pages stay shared.
    gc.collect()
    gc.freeze()


class ForkServer:
    """Answers one executor, whose child it is."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._executor = os.getppid()
        self._die_with_executor = die_with_parent(signal.SIGKILL)

    def run(self) -> None:
        """Until the executor is gone."""
        prepare()
        self._say(ForkServerReady(VERSION))
        while True:
            message, fds = _receive(self._line)
            if not message:
                return
            match _requests.decode(message):
                case ImportModules(modules):
                    with contextlib.suppress(ImportError):  # ranks say what they miss
                        prepare_to_build([name for name in modules if name.startswith(_IMPORTABLE)])
                case Fork(variables, own):
                    self._say(self._fork({**variables, **os.environ, **own}, *fds))
                    for fd in fds:
                        os.close(fd)

    def _say(self, message: msgspec.Struct) -> None:
        self._line.sendall(msgspec.json.encode(message))

    def _fork(self, variables: dict[str, str], stdin: int, events: int, *output: int) -> Forked | ForkRefused:
        if reason := why_not_to_fork():
            return ForkRefused(reason)
        read_end, write_end = os.pipe()
        try:
            between = os.fork()
        except OSError as error:
            os.close(read_end)
            os.close(write_end)
            return ForkRefused(f"the system has no room for another process ({error.strerror})")
        if not between:
            self._be_between(write_end, variables, stdin, events, *output)
        os.close(write_end)
        os.waitpid(between, 0)  # from then on the rank is the executor's child
        told = os.read(read_end, 32)
        os.close(read_end)
        return Forked(int(told)) if told else ForkRefused("the system has no room for another process")

    def _be_between(self, write_end: int, variables: dict[str, str], stdin: int, events: int, *output: int) -> None:
        """The child, whose end makes the rank the executor's. Does not return."""
        try:
            rank = os.fork()
            if not rank:
                self._be_rank(variables, stdin, events, *output)
            os.write(write_end, str(rank).encode())
        finally:
            os._exit(0)

    def _be_rank(self, variables: dict[str, str], stdin: int, events: int, *output: int) -> None:
        """The rank's whole life. Does not return."""
        code = 1
        try:
            os.setsid()  # Ctrl-C goes to the executor alone, which drains the ring
            self._line.close()
            _show_as(RANK_MODULE)
            os.environ.update(variables)
            for number, given in enumerate((stdin, *output)):
                os.dup2(given, number)
                os.close(given)
            self._become_the_executors()
            code = importlib.import_module(RANK_MODULE).main(events)
        except BaseException as error:
            print(f"a rank could not be started: {error!r}", file=sys.stderr)  # noqa: T201  # there is no log yet
        leave(code)

    def _become_the_executors(self) -> None:
        give_up = time.monotonic() + _ADOPTED_WITHIN
        while os.getppid() != self._executor:
            if time.monotonic() > give_up:
                raise RuntimeError("the executor is gone")
            time.sleep(0.0005)
        if self._die_with_executor is not None:
            self._die_with_executor()
        if os.getppid() != self._executor:
            raise RuntimeError("the executor is gone")


def _show_as(module: str) -> None:
    """Has `ps` and others name this process by `module`, in the place that the kernel shows for our own name."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the 48th and 49th of proc(5)
        words = ctypes.string_at(begin, end - begin) if 0 < begin < end else b""
        if (place := words.find(MODULE.encode())) >= 0:
            ctypes.memmove(begin + place, module.encode().ljust(len(MODULE), b"\0")[: len(MODULE)], len(MODULE))


def leave(code: int) -> None:
    """Ends the process of a rank. Not sys.exit: threads of the engine and of NCCL must not be able to hold up a rank
    that is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """(a message, the descriptors that came with it); empty when the other end is gone."""
    size = socket.CMSG_SPACE(4 * array.array("i").itemsize)
    message, ancillary, _, _ = line.recvmsg(LONGEST_MESSAGE, size, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content)
    return message, fds.tolist()


if __name__ == "__main__":
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).run()
