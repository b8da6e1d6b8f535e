"""A GPU that is not there: torch and Triton's interpreter behave as if there were one, and tell what would go wrong.

    with pretend_gpu() as gpu:
        tensor = torch.zeros(3, device="cuda")       says that it is on cuda:0
        tensor + torch.ones(3)                       fails, as it would: of two devices
        tensor.sum().item(); gpu.waits               ["item"]: what the host has waited for the device with
        torch.cuda.graph(...), graph.replay()        does again what torch and Triton were called with, and only that

What is found: operands of two devices; waiting where none may be (all of it in a capture); numbers that a graph has
kept from its capture; pinned memory that is read before it is there or written to before it has been read; streams that
do not wait for each other; memory that is used before it was written. What is not found: anything of speed, of the
kernels as they are compiled, and of how torch's own kernels for GPUs round.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.interpreter import prepare
from tests.pretend_gpu import graphs
from tests.pretend_gpu.streams import HOST, Event, Host, Stream
from tests.pretend_gpu.tensors import DeviceTensor, Placing, held

prepare()
MEMORY = 1 << 30  # bytes of the device


@contextmanager
def pretend_gpu() -> Iterator[Host]:
    HOST.reset()
    with ExitStack() as stack:
        for name, value in _cuda().items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", _launch_kernel))
        stack.enter_context(patch.object(threading.Thread, "run", _run_thread))
        stack.enter_context(Placing())
        yield HOST


def _cuda() -> dict[str, Any]:
    properties = SimpleNamespace(
        name="none", multi_processor_count=4, total_memory=MEMORY, major=9, minor=0,
        uuid="00000000-0000-0000-0000-000000000000", pci_domain_id=0, pci_bus_id=0, pci_device_id=0,
    )  # fmt: skip
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "empty_cache": lambda: None,
        "can_device_access_peer": lambda one, other: True,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": graphs.Graph,
        "graph": graphs.capture,
        "graph_pool_handle": list,
        "current_stream": lambda device=None: HOST.stream,
        "default_stream": lambda device=None: HOST.default,
        "set_stream": _set_stream,
        "stream": _use_stream,
        "synchronize": lambda device=None: HOST.wait_for_all("torch.cuda.synchronize"),
        "is_current_stream_capturing": lambda: HOST.recording is not None,
    }


def _set_stream(stream: Stream) -> None:
    HOST.stream = stream


@contextmanager
def _use_stream(stream: Stream) -> Iterator[None]:
    before, HOST.stream = HOST.stream, stream
    try:
        yield
    finally:
        HOST.stream = before


class _Generator(torch.Generator):
    """The host's, wherever it is meant to be."""

    def __new__(cls, device: object = None) -> "_Generator":
        return super().__new__(cls)


_run_by_itself = threading.Thread.run


def _run_thread(thread: threading.Thread) -> None:
    with Placing():
        _run_by_itself(thread)


_interpret = interpreter.GridExecutor.__call__


def _launch_kernel(executor: Any, *args: Any, **kwargs: Any) -> None:
    """A kernel of Triton's, whose tensors must be on the device."""
    values = [*args, *kwargs.values()]
    if any(isinstance(one, Tensor) and not isinstance(one, DeviceTensor) for one in values):
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
    given = [one for one in values if isinstance(one, DeviceTensor)]
    inner, named = [held(one) for one in args], {name: held(one) for name, one in kwargs.items()}

    def again() -> list[Tensor]:
        with torch._C.DisableTorchFunction():
            _interpret(executor, *inner, **named)
        return []

    HOST.stream.given += 1
    for one in given:
        HOST.use(one.held, "a kernel", writes=True)
    if HOST.recording is not None:
        HOST.recording.add(again, [])
    again()
