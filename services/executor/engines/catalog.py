"""The engines that schedule for themselves, by the name that `ExecutorSettings.serving_engine` gives. Taking a line out
takes the engine out."""

from collections.abc import Callable
from pathlib import Path

from services.executor.core.settings import ExecutorSettings
from services.executor.engines.base import ServingEngine
from services.executor.engines.server.dialects import llamacpp, sglang, vllm
from services.executor.engines.server.engine import server_engine
from services.executor.engines.vllm.engine import VllmEngine
from services.executor.engines.vllm.plugin.ryzanstein_vllm import worker

# Made of the group's settings and the directory of its model; raise `ConfigurationError`.
ENGINES: dict[str, Callable[[ExecutorSettings, Path], ServingEngine]] = {"server": server_engine, "vllm": VllmEngine}

# What each tells as `EngineFacts.unsupported`, by its title in docs/engines.md.
CANNOT: dict[str, list[str]] = {
    "vLLM in process": worker.UNSUPPORTED,
    "vLLM by URL with our processor": vllm.UNSUPPORTED,
    "vLLM by URL": vllm.WITHOUT_PROCESSOR,
    "SGLang": sglang.UNSUPPORTED,
    "llama.cpp": llamacpp.UNSUPPORTED,
}
