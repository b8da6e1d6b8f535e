"""Decides what loads and computes a rank's share of a model: the backend of its device's platform (`backends/`)."""

import torch

from services.executor.native.library import choose_level
from services.executor.worker.backends.base import Backend
from services.executor.worker.backends.catalog import BACKENDS
from services.executor.worker.weights import Share, ShareRequest


def backend_of(device: torch.device) -> Backend:
    return next((one for one in BACKENDS if one.platform == device.type), Backend())


def load_share(request: ShareRequest) -> Share:
    """Raises `ModelLoadError` and `ConfigurationError`: one sentence with the remedy."""
    choose_level(request.settings.cpu_level)
    return backend_of(request.device).load_share(request)
