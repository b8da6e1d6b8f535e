"""Ollama's requests as the chat completion, completion or embeddings that they ask for. Pure.

    messages, tools          ──▶ messages, tools: a result is given the id of its call
    prompt, system           ──▶ messages; with `raw` the prompt of a completion
    format                   ──▶ response_format          options.num_predict    ──▶ max_tokens
    think                    ──▶ variables of the template options.repeat_penalty ──▶ repetition_penalty

What the way of a chat refuses is told under the name that the client knows.
"""

import contextlib
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from services.gateway.core.errors import InvalidField, RouteError, renamed
from services.gateway.dialects.ollama.schemas import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
)
from services.gateway.intake.prompts.conversation import switched
from services.gateway.intake.prompts.embeddings import EmbeddingRequest
from services.gateway.intake.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
)
from services.gateway.intake.validation import check_fields, checked_fields
from services.gateway.tokenizer.templates import Traits
from services.gateway.tool_calls.schemas import CalledFunction, ToolCall

Asked = OllamaChatRequest | OllamaGenerateRequest
Embedded = OllamaEmbedRequest | OllamaEmbeddingsRequest
LATEST = ":latest"  # the tag that a name without one has
_HUBS = ("hf.co/", "huggingface.co/")


def names_of(given: str) -> list[str]:
    """What a model that a client calls `given` may be called here, the likeliest first."""
    plain = plain_name(given)
    return list(dict.fromkeys((given, plain, plain + LATEST)))


def plain_name(given: str) -> str:
    """Without the hub's own name and the implied tag."""
    name = next((given.removeprefix(hub) for hub in _HUBS if given.startswith(hub)), given)
    return name.removesuffix(LATEST)


def tagged(name: str) -> str:
    """The name of a model as Ollama's clients list it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


_DURATION = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(keep_alive: float | str) -> float:
    """Of a number, or of Go's notation of a time (1h30m), which the schema has checked."""
    if not isinstance(keep_alive, str):
        return float(keep_alive)
    parts = _DURATION.findall(keep_alive)
    if not parts:
        return float(keep_alive)
    total = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return -total if keep_alive.startswith("-") else total


def checked(request: Asked) -> list[str]:
    """The fields of `request` that change nothing. Raises `InvalidParameter` for the first that is not supported."""
    for index, message in enumerate(getattr(request, "messages", None) or ()):
        if message.images:
            check_fields(message, f"messages[{index}].")
    return [*checked_fields(request), *checked_fields(request.options, "options.")]


# --- generating ----------------------------------------------------------------------------------


def chat_of(request: Asked, model: str) -> ChatCompletionRequest:
    """`model`: its name here. Raises `InvalidParameter`."""
    if isinstance(request, OllamaChatRequest):
        messages, tools = _messages(request.messages or ()), request.tools
    else:
        system = [Message("system", request.system)] if request.system else []
        messages, tools = [*system, Message("user", request.prompt)], None
    top = request.top_logprobs if request.logprobs else None
    scored: dict[str, Any] = {"logprobs": request.logprobs, "top_logprobs": top}
    fields = _fields(request) | scored
    return ChatCompletionRequest(model=model, messages=messages, tools=tools or None, **fields)


def completion_of(request: OllamaGenerateRequest, model: str) -> CompletionRequest:
    """The prompt as it stands; a system text before it, as a model without a template would be given it."""
    prompt = request.prompt or ""
    if request.system and not request.raw:
        prompt = f"{request.system}\n\n{prompt}"
    fields = _fields(request)
    if request.logprobs:
        fields["logprobs"] = request.top_logprobs or 0
    return CompletionRequest(model=model, prompt=prompt, **fields)


# Options that a chat has as fields of the same name.
_SAME_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "stop", "seed"),
    *("presence_penalty", "frequency_penalty", "sparse_attention", "close_objects"),
)


def _fields(request: Asked) -> dict[str, Any]:
    """What a chat and a completion have in common, as far as it is given."""
    fields: dict[str, Any] = {"stream": request.stream is not False}
    if request.format:
        fields["response_format"] = _format(request.format)
    options = request.options
    if options is None:
        return fields
    given = {name: getattr(options, name) for name in _SAME_OPTIONS} | {
        "seed": None if options.seed == -1 else options.seed,
        "repetition_penalty": options.repeat_penalty,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
    }
    return fields | {name: value for name, value in given.items() if value is not None}


def _format(given: str | dict[str, Any]) -> ResponseFormat:
    if isinstance(given, str):
        return ResponseFormat("json_object")
    return ResponseFormat("json_schema", JsonSchemaFormat("format", schema=given))


def _messages(given: Sequence[OllamaMessage]) -> list[Message]:
    """Calls have no ids in Ollama: a result belongs to the first call of its function that has none yet, and one that
    names no function to the first call. Raises `InvalidParameter`."""
    found: list[Message] = []
    open_calls: list[tuple[str, str]] = []  # (id, function) of calls that wait for a result
    for index, message in enumerate(given):
        if message.role == "tool":
            found.append(Message("tool", message.content or "", tool_call_id=_answered(index, message, open_calls)))
            continue
        calls = [
            ToolCall(
                call.id or f"call_{index}_{number}",
                "function",
                CalledFunction(call.function.name, msgspec.json.encode(call.function.arguments).decode()),
            )
            for number, call in enumerate(message.tool_calls or ())
        ]
        open_calls = [(call.id, call.function.name) for call in calls if call.function]
        content = message.content or ("" if not calls else None)
        found.append(
            Message(message.role, content, tool_calls=calls or None, reasoning_content=message.thinking or None)
        )
    return found


def _answered(index: int, message: OllamaMessage, open_calls: list[tuple[str, str]]) -> str:
    """The id of the call that `message` is the result of, which waits no more."""
    for at, (identity, name) in enumerate(open_calls):
        if identity == message.tool_call_id or (not message.tool_call_id and message.tool_name in (None, "", name)):
            del open_calls[at]
            return identity
    called = message.tool_call_id or message.tool_name or "any function"
    raise InvalidField(
        f"messages[{index}]",
        f"a result of {called[:64]!r} needs a call before it that has no result yet; send "
        "the assistant's message with its tool_calls too.",
    )


def thinking_of(think: bool | str, model: str, traits: Traits, *, reasons: bool) -> dict[str, Any]:
    """Fields of the chat that say so. To a model that does not reason False asks for nothing; one that cannot but
    reason does so, as in Ollama. `reasons`: whether it does at all. Raises `RouteError`."""
    if think and not reasons:
        raise RouteError(
            f"{_quoted(model)} does not support thinking", status=400, reason="unsupported_parameter", param="think"
        )
    if isinstance(think, str) and "reasoning_effort" in traits.variables:
        return {"reasoning_effort": think}
    return switched(traits, on=bool(think))


def not_found(given: str) -> RouteError:
    """In the words that Ollama's clients look for."""
    return RouteError(f"model '{given[:128]}' not found", reason="model_not_found", param="model")


def _quoted(name: str) -> str:
    return '"' + name[:128] + '"'


# --- vectors -------------------------------------------------------------------------------------


def embedding_of(request: Embedded, model: str) -> EmbeddingRequest:
    """Raises `InvalidParameter`."""
    if isinstance(request, OllamaEmbeddingsRequest):
        return EmbeddingRequest(model=model, input=request.prompt or "")
    texts = request.input or []
    given: Any = texts if isinstance(texts, str) else [*texts]
    cut: dict[str, Any] = {"truncate_prompt_tokens": -1, "truncation_side": "right"}
    return EmbeddingRequest(
        model=model, input=given, dimensions=request.dimensions, **({} if request.truncate is False else cut)
    )


# --- errors --------------------------------------------------------------------------------------

_MESSAGE = re.compile(r"^messages\b.*$")
_WORDS = {"max_tokens": "options.num_predict"}
# The chat's fields, and what they are called here; a longer name before its beginning.
NAMES = {
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format.json_schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
    "chat_template_kwargs": "think",
} | {name: f"options.{name}" for name in _SAME_OPTIONS}


def own_words(request: Asked) -> contextlib.AbstractContextManager[None]:
    """Errors of a chat's way, in the words of `request`."""
    if isinstance(request, OllamaChatRequest):
        return renamed(NAMES, "messages", _WORDS)
    return renamed(NAMES, "prompt", _WORDS | {"messages": "prompt"}, partial(_MESSAGE.sub, "prompt"))
