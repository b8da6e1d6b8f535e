"""Decides what loads and computes a rank's share of a model: the backend of its device's platform (`backends/`)."""

from functools import partial
from pathlib import Path

import torch

from services.executor.collectives.base import Collectives
from services.executor.core.layer_state import LayerStates
from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.rank_pipe import RankSpec
from services.executor.kv_cache.capacity import StepWidths, check_room
from services.executor.native.library import choose_level
from services.executor.worker.backends.base import Backend
from services.executor.worker.backends.catalog import BACKENDS
from services.executor.worker.weights import MemoryCheck, Report, Share, ShareRequest


def backend_of(device: torch.device) -> Backend:
    return next((one for one in BACKENDS if one.platform == device.type), Backend())


def load_share(
    settings: ExecutorSettings,
    spec: RankSpec,
    directory: Path,
    device: torch.device,
    collectives: Collectives,
    report: Report,
    enough: MemoryCheck | None = None,
) -> Share:
    """`enough`: whether there is room for it; None: `check_room` of the settings. Raises `ModelLoadError` and
    `ConfigurationError`: one sentence with the remedy."""
    choose_level(settings.cpu_level)
    has_room = enough or partial(_has_room, settings, device)
    return backend_of(device).load_share(
        ShareRequest(settings, spec, directory, device, collectives, report, has_room)
    )


def _has_room(
    settings: ExecutorSettings,
    device: torch.device,
    states: LayerStates,
    dtype: torch.dtype,
    context: int,
    widths: StepWidths | None,
    weights: int,
) -> None:
    """`MemoryCheck` of a model that is alone."""
    held = min(weights, settings.weights_memory or weights)
    check_room(settings, states, dtype, context, device, held, widths)
