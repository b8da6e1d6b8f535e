"""The engines that schedule for themselves, by the name that `ExecutorSettings.serving_engine` gives. Taking a line out
takes the engine out."""

from collections.abc import Callable
from pathlib import Path

from services.executor.core.settings import ExecutorSettings
from services.executor.engines.base import ServingEngine
from services.executor.engines.server.engine import server_engine
from services.executor.engines.vllm.engine import VllmEngine

# Made of the group's settings and the directory of its model; raise `ConfigurationError`.
ENGINES: dict[str, Callable[[ExecutorSettings, Path], ServingEngine]] = {"server": server_engine, "vllm": VllmEngine}
