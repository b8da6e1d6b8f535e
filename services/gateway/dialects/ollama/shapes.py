"""What Ollama's API shows of models (`ShowResponse`), and its answers as types for the document."""

import hashlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from services.gateway.core.catalog import Catalog
from services.gateway.core.errors import describe
from services.gateway.dialects.ollama.formats import rfc3339
from services.gateway.dialects.ollama.translation import tagged
from services.gateway.intake.prompts.chat import reasoning_of
from services.gateway.streams.progress import PromptProgress
from services.gateway.tokenizer.tokenizer import Tokenizer
from services.gateway.tool_calls.families import NONE
from shared.messages import ModelCard
from shared.messages.registry import AdapterRecord
from shared.model_status import ModelStatus
from shared.models import GGUF

API_VERSION = "0.12.6"  # of Ollama, whose API this is: some clients ask for a version at least
# When a model is unloaded that is kept until others need its memory.
NEVER = rfc3339(datetime(9999, 12, 31, tzinfo=UTC).timestamp())
# Of keys in `model_info`: clients look for `<general.architecture>.context_length`.
_ARCHITECTURE = "ryzanstein"


class OllamaError(msgspec.Struct, frozen=True):
    """Also the last line of a stream that fails."""

    error: str


def described(error: BaseException, request_id: str) -> OllamaError:
    """The body for an error, with the request's id."""
    return OllamaError(describe(error, request_id).error.message)


class OllamaVersion(msgspec.Struct, frozen=True):
    version: str  # of Ollama's API
    ryzanstein: str


class ModelDetails(msgspec.Struct, frozen=True):
    """Empty: not known, as `family` is before the first load, and `parameter_size` always."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class TaggedModel(msgspec.Struct, frozen=True):
    name: str
    model: str
    modified_at: str
    size: int  # bytes on disk, or in memory; 0: not known yet
    digest: str  # of the model's entry: of its name, source and revision, and of an adapter of its content
    details: ModelDetails


class TaggedModels(msgspec.Struct, frozen=True):
    models: list[TaggedModel]


class LoadedModel(msgspec.Struct, frozen=True):
    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str  # when it is unloaded, should nobody ask for it from now on
    size_vram: int
    context_length: int


class LoadedModels(msgspec.Struct, frozen=True):
    models: list[LoadedModel]


class ShownModel(msgspec.Struct, frozen=True):
    """What /api/show answers."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class ShowResponse:
    """Models as one gateway knows them, now."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def tags(self, tenant: str) -> list[TaggedModel]:
        """Models, their aliases and the adapters that a tenant may use, by name."""
        found = []
        for model, status in self._catalog.statuses().items():
            found += [self._tag(name, model, status) for name in (model, *self._aliases(model))]
        adapters = sorted(self._catalog.adapters.seen_by(tenant), key=lambda one: one.name)
        return [*found, *map(self._adapter, adapters)]

    def loaded(self) -> list[LoadedModel]:
        now = time.time()
        return [self._loaded(model, status, now) for model, status in self._catalog.statuses().items() if status.ready]

    def one(self, name: str, tokenizer: Tokenizer | None, tenant: str) -> ShownModel:
        """`name` is known; `tokenizer`: None where its model was never loaded."""
        resolved = self._catalog.resolve(name, tenant)
        model = resolved.model
        adapter = self._catalog.adapters.find(name, tenant) if resolved.adapter else None
        spec, card = self._catalog.registry.specs.get(model), self._catalog.known_card(model)
        length = card.context_length if card else spec.settings.context_length or 0 if spec else 0
        info: dict[str, Any] = {
            "general.architecture": _ARCHITECTURE,
            "general.basename": model,
            f"{_ARCHITECTURE}.context_length": length,
        }
        if card is not None:
            info[f"{_ARCHITECTURE}.vocab_size"] = card.vocab_size
        if card is not None and card.embedding_size:
            info[f"{_ARCHITECTURE}.embedding_length"] = card.embedding_size
        lines = [f"FROM {model}", *([f"ADAPTER {adapter.source}"] if adapter else [])]
        return ShownModel(
            modelfile="\n".join(lines) + "\n",
            parameters=_parameters({**(card.defaults if card else {}), **resolved.defaults}),
            template=_template(tokenizer),
            details=self._details(model, parent=model if adapter or name != model else ""),
            model_info=info,
            capabilities=_capabilities(card, tokenizer),
            modified_at=rfc3339(adapter.created if adapter else self._created(model)),
        )

    def digest(self, model: str) -> str:
        spec = self._catalog.registry.specs.get(model)
        identity = (spec.name, spec.source, spec.revision) if spec else (model, "", "")
        return hashlib.sha256("\0".join(identity).encode()).hexdigest()

    def _tag(self, name: str, model: str, status: ModelStatus) -> TaggedModel:
        return TaggedModel(
            tagged(name),
            tagged(name),
            rfc3339(self._created(model)),
            self._size(model, status),
            self.digest(model),
            self._details(model, parent=model if name != model else ""),
        )

    def _adapter(self, record: AdapterRecord) -> TaggedModel:
        details = self._details(record.model, parent=record.model)
        name = tagged(record.name)
        return TaggedModel(name, name, rfc3339(record.created), record.bytes, record.digest, details)

    def _loaded(self, model: str, status: ModelStatus, now: float) -> LoadedModel:
        spec, card = self._catalog.registry.specs.get(model), self._catalog.known_card(model)
        kept = spec is None or spec.pinned or not spec.idle
        size = self._size(model, status)
        return LoadedModel(
            tagged(model),
            tagged(model),
            size,
            self.digest(model),
            self._details(model),
            NEVER if kept or spec is None else rfc3339(now + spec.idle),
            size if self._on_gpus(status) else 0,
            card.context_length if card is not None else 0,
        )

    def _details(self, model: str, parent: str = "") -> ModelDetails:
        """What nobody knows, as before the first load, is empty; nothing is read out of names but GGUF's
        quantization."""
        spec, card = self._catalog.registry.specs.get(model), self._catalog.known_card(model)
        source = spec.source if spec is not None else model
        tag = source.rpartition("/")[2].partition(":")[2]
        family, stored = (card.architecture, card.weights) if card is not None else ("", "")
        gguf = bool(tag) or source.endswith(".gguf") or stored.startswith(GGUF)
        asked = spec.settings.weight_dtype if spec is not None else None
        return ModelDetails(
            parent_model=parent,
            format="gguf" if gguf else "safetensors",
            family=family,
            families=[family] if family else [],
            parameter_size="",
            quantization_level=tag or (asked if asked and asked != "auto" else stored.removeprefix(GGUF).strip()),
        )

    def _aliases(self, model: str) -> list[str]:
        spec = self._catalog.registry.specs.get(model)
        return spec.aliases if spec is not None else []

    def _created(self, model: str) -> float:
        spec, card = self._catalog.registry.specs.get(model), self._catalog.known_card(model)
        return spec.created if spec is not None and spec.created else card.created if card is not None else 0

    def _size(self, model: str, status: ModelStatus) -> int:
        hosts = self._catalog.registry.hosts.values()
        said = [one.total for host in hosts for one in host.host.models if one.model == model]
        return max([*said, status.total]) or status.memory

    def _on_gpus(self, status: ModelStatus) -> bool:
        hosts = self._catalog.registry.hosts
        return any(hosts[name].host.devices > 0 for name in status.hosts if name in hosts)


def _parameters(defaults: Mapping[str, Any]) -> str:
    """As a Modelfile has them."""
    return "\n".join(f"{name:<30} {value}" for name, value in defaults.items())


def _template(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    found = msgspec.json.decode(tokenizer.info).get("chat_template", "")
    return found if isinstance(found, str) else ""


def _capabilities(card: ModelCard | None, tokenizer: Tokenizer | None) -> list[str]:
    """Of a model that was never loaded: completion, which most can do. Tools are for every model that chats."""
    if card is None or tokenizer is None:
        return ["completion"]
    tests: dict[str, Callable[[], bool]] = {
        "completion": lambda: True,
        "tools": lambda: tokenizer.chats and card.tool_parser != NONE,
        "thinking": lambda: bool(reasoning_of(card, tokenizer.traits)),
        "embedding": lambda: card.embedding_size > 0,
    }
    return [name for name, holds in tests.items() if holds()]


# --- for the document alone ----------------------------------------------------------------------


class Figures(msgspec.Struct, kw_only=True):
    """Of the last line; durations are nanoseconds."""

    done_reason: Literal["stop", "length", "load", "unload"] | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    # This server's own, where there are any: tokens that have not read everything before them.
    prompt_eval_sparse_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_sparse_count: int | msgspec.UnsetType = msgspec.UNSET


class OllamaTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTokenLogprob):
    top_logprobs: list[OllamaTokenLogprob] | msgspec.UnsetType = msgspec.UNSET


class Line(Figures, kw_only=True):
    model: str
    created_at: str
    done: bool
    logprobs: list[OllamaLogprob] | msgspec.UnsetType = msgspec.UNSET
    # Where in its log the generation stands, where `X-Ryzanstein-Positions: true` asks for it: the `Last-Event-ID`
    # behind the line.
    position: str | msgspec.UnsetType = msgspec.UNSET
    # How much of a long prompt is computed, where `X-Ryzanstein-Progress: true` asks for it.
    prompt_progress: PromptProgress | msgspec.UnsetType = msgspec.UNSET


class AnswerFunction(msgspec.Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class AnswerCall(msgspec.Struct):
    id: str
    function: AnswerFunction


class AnswerMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnswerCall] | msgspec.UnsetType = msgspec.UNSET


class ChatLine(Line, kw_only=True):
    message: AnswerMessage


class GenerateLine(Line, kw_only=True):
    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET


class Embeddings(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class SingleEmbedding(msgspec.Struct):
    embedding: list[float]


class Progress(msgspec.Struct, omit_defaults=True):
    """A line of a pull or a create."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0
