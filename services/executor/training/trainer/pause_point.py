"""What a trainer looks at between two layers: whether it is to pause, and how far ahead of its GPU it is.

    layer ── pause? ── layers in the GPU's queue ── layer ── ...

It is suspended from outside while interactive requests run (`supervisor/trainings/suspension.py`), wherever it is. A
GPU then computes what it has in its queue to the end: that is kept short.
"""

import threading
from collections import deque

import torch

from services.executor.platforms.base import DeviceEvent
from services.executor.platforms.catalog import platform_of

# Layers that a GPU may have in its queue, which is what a request that comes has to wait for.
_LAYERS_AHEAD = 2


class PauseWanted(Exception):
    """Somebody wants a pause: the step under way is given up, to be made again."""


class Gate:
    """Between two layers."""

    def __init__(self, device: torch.device, pause: threading.Event) -> None:
        """`pause`: is set when somebody wants one."""
        self._pause = pause
        self._platform = platform_of(device)
        self._launched: deque[DeviceEvent] = deque()

    def __call__(self) -> None:
        """Raises `PauseWanted`."""
        if self._pause.is_set():
            raise PauseWanted
        if self._platform.is_host:
            return
        event = self._platform.event()
        event.record()
        self._launched.append(event)
        if len(self._launched) > _LAYERS_AHEAD:
            self._launched.popleft().synchronize()
