"""Bodies of Ollama's API (https://github.com/ollama/ollama/blob/main/docs/api.md), as its clients send them.

A field that is null counts as not given, and one that Ollama does not have is refused by name. Among `options` Ollama
takes any name; of its own those that change nothing here are named in `x-ryzanstein-ignored-fields`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.intake.rules import ignored, neutral
from services.gateway.intake.schemas import (
    MAX_COUNT,
    LogprobCount,
    ModelName,
    Penalty,
    PositiveCount,
    SparseAttentionField,
    StopString,
    Temperature,
    TopP,
)
from services.gateway.tool_calls.schemas import Tool
from shared import limits

_Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Names that are not among these are ignored, as Ollama does."""

    # Tokens at most; below 1: what the context leaves. More than that is lowered to it.
    num_predict: Annotated[int, Meta(ge=-(2**31), le=MAX_COUNT)] | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    top_p: TopP | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: _Seed | None = None  # -1: any
    stop: StopString | Annotated[list[StopString], limits.STOP_STRINGS.length()] | None = None
    # Over the whole text: `repeat_last_n` changes nothing here.
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    sparse_attention: SparseAttentionField | None = None
    close_objects: bool | None = None  # this server's own
    typical_p: Annotated[Any, neutral(1, 1.0)] = None

    # how a model is loaded, which its entry in the registry says here
    num_ctx: Annotated[Any, ignored()] = None
    num_batch: Annotated[Any, ignored()] = None
    num_gpu: Annotated[Any, ignored()] = None
    main_gpu: Annotated[Any, ignored()] = None
    num_thread: Annotated[Any, ignored()] = None
    use_mmap: Annotated[Any, ignored()] = None

    # how tokens are chosen, and what is kept of a text that is too long
    repeat_last_n: Annotated[Any, ignored()] = None
    num_keep: Annotated[Any, ignored()] = None
    mirostat: Annotated[Any, ignored(0, 0.0)] = None
    mirostat_eta: Annotated[Any, ignored()] = None
    mirostat_tau: Annotated[Any, ignored()] = None
    tfs_z: Annotated[Any, ignored(1, 1.0)] = None
    penalize_newline: Annotated[Any, ignored()] = None


# 0: unload behind the answer; below 0: pin.
KeepAlive = (
    float
    | Annotated[
        str,
        Meta(
            pattern=r"^(-?[0-9]{1,9}(\.[0-9]{1,9})?|-?([0-9]{1,9}(\.[0-9]{1,9})?(ns|us|µs|ms|s|m|h))+)$(?!\n)",
            extra={"expected": "seconds, or a time such as 5m or 1h30m"},
        ),
    ]
)


class OllamaCalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None
    description: str | None = None


class OllamaToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: OllamaCalledFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation. A result of a tool names it in `tool_name`, or its call in `tool_call_id`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[Any, neutral([])] = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What chat and generate have in common."""

    model: ModelName
    stream: bool | None = None  # left out: true
    format: Literal["", "json"] | dict[str, Any] | None = None  # `json`, or a JSON Schema
    options: Options | None = None
    keep_alive: KeepAlive | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    truncate: Annotated[Any, ignored(False)] = None  # what is too long is refused here, never shortened
    shift: Annotated[Any, ignored(False)] = None


class OllamaChatRequest(_Request, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /api/chat. Without messages: the model is loaded, or unloaded with `keep_alive` 0."""

    messages: Annotated[list[OllamaMessage], limits.MESSAGES.length()] | None = None
    tools: Annotated[list[Tool], limits.TOOLS.length()] | None = None


class OllamaGenerateRequest(_Request, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /api/generate. Without a prompt: as a chat without messages."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt is completed as it stands, without the model's template
    suffix: Annotated[Any, neutral("")] = None  # no open model says how it was taught to fill in the middle
    template: Annotated[Any, neutral("")] = None  # the model's own chat template is used
    # Ollama has deprecated it: send the conversation to /api/chat.
    context: Annotated[Any, neutral([])] = None
    images: Annotated[Any, neutral([])] = None
    width: Annotated[Any, neutral(0, 0.0)] = None
    height: Annotated[Any, neutral(0, 0.0)] = None
    steps: Annotated[Any, neutral(0, 0.0)] = None


_Text = Annotated[str, Meta(min_length=1)]


class OllamaEmbedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embed."""

    model: ModelName
    input: _Text | Annotated[list[_Text], limits.EMBEDDING_INPUTS.length()] | None = None
    # Left out: true, only the first tokens of what is longer than the context are read.
    truncate: bool | None = None
    dimensions: PositiveCount | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /api/embeddings, the older one: one text."""

    model: ModelName
    prompt: str | None = None
    options: Options | None = None
    keep_alive: KeepAlive | None = None
