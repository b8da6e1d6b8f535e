"""One rank's share of a model in memory, before its KV cache is made: the interface of what backends load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services.executor.collectives.base import Collectives
from services.executor.core.layer_state import LayerStates
from services.executor.core.settings import ExecutorSettings
from services.executor.core.sharding import ShardLayout
from services.executor.core.step_plan import StepLimits
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_cache.capacity import StepWidths, check_room
from services.executor.kv_cache.offload import Spill
from services.executor.kv_cache.store import KvStore
from services.executor.model.model_facts import ModelFacts
from services.executor.worker.runner import ModelRunner
from shared.errors import ConfigurationError
from shared.messages import StreamedWeights

Report = Callable[[int, int], None]  # called with (bytes done, bytes in all)


class Share:
    """A rank's weights."""

    is_cached = False  # whether an earlier start has kept them, which had checked the model's other files too
    facts: ModelFacts
    layout: ShardLayout
    dtype: torch.dtype
    widths: StepWidths | None = None  # of its steps, where a GPU's memory is planned by them
    reads_compressed: bool  # see `Backend.reads_compressed`

    def runner(
        self, store: KvStore, spill: Spill, limits: StepLimits | None, beside: ModelRunner | None = None
    ) -> ModelRunner:
        """To be called once. `beside`: see `RunnerRequest`."""
        raise NotImplementedError

    def keep(self, packed: Any) -> None:
        """Has the next start of this rank find `packed`, of its runner, where that can be kept and is not yet."""

    def settle(self) -> None:
        """Before the rank ends: waits for what it keeps, or the next start would have to make it once more."""

    streamed: StreamedWeights | None = None  # where not all are in memory

    @property
    def imports(self) -> list[str]:
        """Modules that the next start of this rank will need beyond those of every start."""
        return []


# Called with (states, dtype, context, widths, weights). Raises `ConfigurationError` where this rank has no room for a
# model that is to serve sequences of `context` tokens and whose weights take `weights` bytes; the others as of
# `ModelFacts` and `Share`.
MemoryCheck = Callable[[LayerStates, torch.dtype, int, StepWidths | None, int], None]


class ShareRequest(NamedTuple):
    """Which rank's share of which model."""

    settings: ExecutorSettings
    spec: RankSpec
    directory: Path
    device: torch.device
    collectives: Collectives
    report: Report
    has_room: MemoryCheck | None = None  # None: that of a model which is alone

    def check_room(
        self, states: LayerStates, dtype: torch.dtype, context: int, widths: StepWidths | None, weights: int
    ) -> None:
        """`MemoryCheck`"""
        if self.has_room is not None:
            self.has_room(states, dtype, context, widths, weights)
            return
        held = min(weights, self.settings.weights_memory or weights)
        check_room(self.settings, states, dtype, context, self.device, held, widths)


def context_of(settings: ExecutorSettings, usual: int, longest: int = 0) -> int:
    """Most tokens of one sequence, of a model that is served with `usual` where nothing is set, and with `longest` at
    most (0: the same). Raises `ConfigurationError`."""
    longest = longest or usual
    if settings.context_length > longest:
        raise ConfigurationError(
            f"--context-length {settings.context_length} is more than the model was made for; choose {longest} or less."
        )
    return settings.context_length or usual
