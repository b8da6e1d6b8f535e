"""The kinds of servers, by the names that operators write."""

from collections.abc import Callable

from services.executor.engines.server.client import ServerClient
from services.executor.engines.server.dialects.base import ServerDialect
from services.executor.engines.server.dialects.llamacpp import LlamaCppDialect
from services.executor.engines.server.dialects.sglang import SglangDialect
from services.executor.engines.server.dialects.vllm import VllmDialect

DIALECTS: dict[str, Callable[[ServerClient], ServerDialect]] = {
    "vllm": VllmDialect,
    "sglang": SglangDialect,
    "llama.cpp": LlamaCppDialect,
}
