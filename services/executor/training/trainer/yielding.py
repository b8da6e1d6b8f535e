"""A trainer stands still while somebody waits for an answer: it looks between two layers.

    layer ── idle? ── layer ── not idle: wait, asking every few milliseconds ── idle for a while ── layer

What it waits changes nothing of what it computes.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from services.executor.ipc.activity import HostActivity

FIRST_NAP, LONGEST_NAP = 0.002, 0.02
"""Seconds until it looks again: twice as long each time."""
QUIET = 0.1
"""Seconds without interactive requests after which it goes on: a conversation's next request comes soon."""
GIVE_UP_AFTER = 3.0
"""Seconds for which a pause waits for the step under way; one that takes longer is made again later."""
_LAYERS_AHEAD = 2
"""Layers that a GPU may have in its queue, which is what a request that comes has to wait for."""


class PauseWanted(Exception):
    """Somebody wants a pause of a trainer that stands still, or has much left of its step: that is given up, to be made
    again."""


class Gate:
    """Between two layers."""

    def __init__(
        self,
        activity: HostActivity | None,
        device: torch.device,
        tell: Callable[[bool], None],
        pause: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`activity`: None: nobody else uses the host. `tell`: called when it begins to wait and when it goes on.
        `pause`: is set when somebody wants one."""
        self._activity = activity
        self._tell = tell
        self._pause = pause
        self._clock = clock
        self._launched: deque[torch.cuda.Event] | None = deque() if device.type == "cuda" else None
        self._pause_by: float | None = None
        self.waited = 0.0
        """Seconds, since the trainer began."""

    def __call__(self) -> None:
        """Raises `PauseWanted`."""
        if self._pause.is_set():
            self._look_at_pause()
        if self._launched is not None:
            self._wait_for_layers(self._launched)
        if self._activity is not None and not self._activity.is_idle:
            self._wait(self._activity)

    def _look_at_pause(self) -> None:
        now = self._clock()
        if self._pause_by is None:
            self._pause_by = now + GIVE_UP_AFTER
        elif now >= self._pause_by:
            raise PauseWanted

    def _wait(self, activity: HostActivity) -> None:
        self._tell(True)
        began = self._clock()
        try:
            nap, quiet_since = FIRST_NAP, None
            while True:
                if self._pause.wait(nap):
                    raise PauseWanted
                now = self._clock()
                if not activity.is_idle:
                    nap, quiet_since = min(2 * nap, LONGEST_NAP), None
                elif quiet_since is None:
                    quiet_since = now
                elif now - quiet_since >= QUIET:
                    return
        finally:
            self.waited += self._clock() - began
            self._tell(False)

    def _wait_for_layers(self, launched: deque[torch.cuda.Event]) -> None:
        """For all but the last ones."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        launched.append(event)
        if len(launched) > _LAYERS_AHEAD:
            launched.popleft().synchronize()
