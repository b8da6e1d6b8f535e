"""Models that we recommend: a table, what of it fits a machine, and the speed to expect.

    tokens/s of one sequence  ≈  0.7 * memory bandwidth / bytes that a token reads

0.7 is what decoding reaches of the measured rate (docs/performance.md). Sizes are those of the files at the hub.
"""

import os
from collections.abc import Iterable

import httpx
import msgspec
import psutil

from services.cli.machine import memory_left
from services.cli.ui import megabytes
from shared.model_store.settings import Store

USES = ("text", "code", "embeddings")
_SHARE = 0.7  # of the memory's rate that decoding reaches
_BESIDE = 1_500_000_000  # bytes for the services and a KV cache
_GB = 1_000_000_000
_HUB = "https://huggingface.co"
_AT_ONCE = 2.0  # seconds that the hub has to answer


class RecommendedModel(msgspec.Struct, frozen=True):
    """A row of the table."""

    name: str  # as `ryzanstein up --model` takes it
    use: str
    bytes: int  # of its files, which is what its weights take in memory
    licence: str
    about: str
    active: int = 0  # bytes of weights that a token reads, of mixtures of experts; 0: all

    @property
    def read_per_token(self) -> int:
        return self.active or self.bytes

    @property
    def memory(self) -> int:
        """Bytes, with what serving takes beside the weights."""
        return self.bytes + _BESIDE


def _row(name: str, use: str, gigabytes: float, licence: str, about: str, active: float = 0) -> RecommendedModel:
    return RecommendedModel(name, use, int(gigabytes * _GB), licence, about, int(active * _GB))


# Within a use the smallest first.
MODELS = (
    _row("SmolLM2-135M-Instruct", "text", 0.27, "Apache-2.0", "built in; English; to try things out"),
    _row("Qwen/Qwen3-0.6B-GGUF:Q8_0", "text", 0.64, "Apache-2.0", "many languages, tools, reasoning; the smallest"),
    _row("Qwen/Qwen3-1.7B-GGUF:Q8_0", "text", 1.83, "Apache-2.0", "many languages, tools, reasoning"),
    _row("ggml-org/SmolLM3-3B-GGUF:Q4_K_M", "text", 1.92, "Apache-2.0", "six languages, tools, reasoning"),
    _row(
        "Qwen/Qwen3-4B-GGUF:Q4_K_M", "text", 2.50, "Apache-2.0", "many languages, tools, reasoning; good for its size"
    ),
    _row("ggml-org/gemma-3-4b-it-GGUF:Q4_K_M", "text", 2.49, "Gemma", "140 languages, 128k context"),
    _row("Qwen/Qwen3-8B-GGUF:Q4_K_M", "text", 5.03, "Apache-2.0", "many languages, tools, reasoning"),
    _row("ggml-org/gemma-3-12b-it-GGUF:Q4_K_M", "text", 7.30, "Gemma", "140 languages, 128k context"),
    _row("Qwen/Qwen3-14B-GGUF:Q4_K_M", "text", 9.00, "Apache-2.0", "many languages, tools, reasoning"),
    _row("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", "text", 18.56, "Apache-2.0", "a mixture of experts: large and fast", 2.0),
    _row("Qwen/Qwen3-32B-GGUF:Q4_K_M", "text", 19.76, "Apache-2.0", "many languages, tools, reasoning"),
    _row("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M", "code", 1.12, "Apache-2.0", "completion and small edits"),
    _row("Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", "code", 4.68, "Apache-2.0", "edits of files, tools"),
    _row("Qwen/Qwen2.5-Coder-14B-Instruct-GGUF:Q4_K_M", "code", 8.99, "Apache-2.0", "edits of files, tools"),
    _row(
        "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:Q4_K_M",
        "code",
        18.56,
        "Apache-2.0",
        "agents: tools, 256k context; a mixture of experts",
        2.0,
    ),
    _row("BAAI/bge-small-en-v1.5", "embeddings", 0.13, "MIT", "English, 384 numbers a text"),
    _row("google/embeddinggemma-300m", "embeddings", 1.21, "Gemma", "100 languages, 768 numbers a text"),
    _row(
        "Qwen/Qwen3-Embedding-0.6B", "embeddings", 1.19, "Apache-2.0", "100 languages, long texts, 1024 numbers a text"
    ),
)


class Recommendation(msgspec.Struct, frozen=True):
    """A model that fits. The shape of an element of `models recommend --json`."""

    model: RecommendedModel
    memory: int  # bytes
    tokens_per_second: float  # of one sequence; 0: of a model that makes embeddings


def fitting(models: Iterable[RecommendedModel], memory: int, rate: float) -> list[Recommendation]:
    """Those of `models` that `memory` bytes hold, with what `rate` bytes per second make of them."""
    return [
        Recommendation(
            model, model.memory, 0.0 if model.use == "embeddings" else round(_SHARE * rate / model.read_per_token, 1)
        )
        for model in models
        if model.memory <= memory
    ]


def better_than(name: str, memory: int) -> RecommendedModel | None:
    """The largest model for texts that `memory` bytes hold and a token reads little of; None where `name` is it. For
    a start, which does not measure."""
    most = 3 * _GB
    held = [one for one in MODELS if one.use == "text" and one.memory <= memory and one.read_per_token <= most]
    best = max(held, key=lambda one: one.bytes, default=None)
    return None if best is None or best.name == name else best


async def better_model(name: str, store: Store) -> str:
    """A line about a model that fits this machine better than `name`; empty where there is none, or the hub that it
    would come from gives no answer at once."""
    found = better_than(name, min(psutil.virtual_memory().total, memory_left()))
    if found is None or os.environ.get("HF_HUB_OFFLINE"):
        return ""
    endpoint = store.endpoint or os.environ.get("HF_ENDPOINT") or _HUB
    try:
        async with httpx.AsyncClient(timeout=_AT_ONCE) as client:
            await client.head(endpoint)
    except (httpx.HTTPError, httpx.InvalidURL):
        return ""
    return f"A better model fits this machine ({megabytes(found.bytes)}): ryzanstein up --model {found.name}"
