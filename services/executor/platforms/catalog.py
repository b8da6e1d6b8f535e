"""The platforms. With `--device auto` ranks compute on the first one that this host has. Taking a line out takes the
feature out."""

import torch

from services.executor.core.settings import ExecutorSettings
from services.executor.platforms.base import Platform
from services.executor.platforms.cpu import Cpu
from services.executor.platforms.cuda import Cuda
from shared.errors import ConfigurationError

PLATFORMS: tuple[Platform, ...] = (Cuda(), Cpu())


def platform_of(device: torch.device) -> Platform:
    return {one.name: one for one in PLATFORMS}[device.type]


def choose_platform(setting: str) -> Platform:
    """`setting`: as `ExecutorSettings.device`. Raises `ConfigurationError`."""
    for platform in PLATFORMS:
        if setting == platform.name or (setting == "auto" and platform.is_available()):
            return platform
    served = ", ".join(one.name for one in PLATFORMS)
    raise ConfigurationError(f"--device {setting} is not supported here; use one of auto, {served}.")


def choose_device(settings: ExecutorSettings, rank: int) -> torch.device:
    """Each rank takes the device of its place on its host. Raises `ConfigurationError`."""
    return choose_platform(settings.device).take_device(settings, rank)
