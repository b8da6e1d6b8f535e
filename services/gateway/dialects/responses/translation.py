"""A response's request as the chat completion that it is inside, and what of it the response shows. Pure.

    text.format          ──▶ response_format         max_output_tokens ──▶ max_completion_tokens
    tools, tool_choice   ──▶ tools, tool_choice      reasoning.effort  ──▶ reasoning_effort
    input, instructions  ──▶ messages                text.verbosity    ──▶ verbosity

What the chat path refuses is told under the name that the client knows.
"""

import contextlib
import re
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from services.gateway.core.errors import convert, own_name, renamed
from services.gateway.dialects.responses.conversation.items import chat_messages
from services.gateway.dialects.responses.schemas import (
    CompactRequest,
    InputFields,
    ReasoningOptions,
    ResponseRequest,
    conversation_of,
    is_prewarm,
    wants_logprobs,
)
from services.gateway.dialects.responses.stream.items import Item
from services.gateway.dialects.responses.tools import TOOL_TYPES, Tools, chat_tool_choice, chat_tools, placed_tools
from services.gateway.intake.schemas import ChatCompletionRequest, GenerationFields
from services.gateway.intake.validation import marked
from shared.messages import SamplingParams
from shared.messages.records import ResponseRecord

# The chat's fields, and what they are called here; a longer name before its beginning.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
_ITS_OWN = {"metadata", "store", "stream", "stream_options"}
# Fields of a chat under the same name, with the same meaning.
_AS_A_CHATS = tuple(
    (set(ResponseRequest.__struct_fields__) & set(GenerationFields.__struct_fields__))
    - _ITS_OWN.union(marked(ResponseRequest, "ignored"))
)
_FUNCTION = re.compile(r"^(tools\[\d+\]|tool_choice)\.(?:function|custom)\b")
_TOOL = re.compile(r"^tools\[(\d+)\]")
_MESSAGE = re.compile(r"^messages\b.*$")


def chat_request(request: InputFields, items: Sequence[Item], *, stream: bool = False) -> ChatCompletionRequest:
    """Raises `InvalidParameter`, in a chat's words (`own_words`)."""
    body: dict[str, Any] = {
        "chat_template_kwargs": request.chat_template_kwargs,
        "model": request.model,
        "messages": chat_messages(_thoughts_shown(items, request), request.instructions),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _response_format(request),
        "tool_choice": chat_tool_choice(request.tool_choice),
        "tools": chat_tools(request.tools),
        "verbosity": request.text.verbosity if request.text else None,
    }
    if isinstance(request, CompactRequest | ResponseRequest):
        body |= {
            "prompt_cache_key": request.prompt_cache_key,
            "prompt_cache_options": _cache_options(request),
            "prompt_cache_retention": request.prompt_cache_retention,
            "service_tier": request.service_tier,
        }
    if isinstance(request, ResponseRequest):
        body |= {name: getattr(request, name) for name in _AS_A_CHATS}
        body |= {
            "logprobs": wants_logprobs(request) or None,
            "max_completion_tokens": 1 if is_prewarm(request) else request.max_output_tokens,
            "stream": stream,
            "stream_options": _stream_options(request) if stream else None,
            "top_logprobs": request.top_logprobs if wants_logprobs(request) else None,
        }
    given = {name: value for name, value in body.items() if value is not None}
    return convert(given, ChatCompletionRequest)


def _thoughts_shown(items: Sequence[Item], request: InputFields) -> Sequence[Item]:
    """`items` without the reasoning of turns that are over, where the request wants it so."""
    if request.reasoning is None or request.reasoning.context != "current_turn":
        return items
    said = [number for number, item in enumerate(items) if item.get("role") == "user"]
    begin = said[-1] if said else 0
    return [item for number, item in enumerate(items) if number > begin or item["type"] != "reasoning"]


def _response_format(request: InputFields) -> dict[str, Any] | None:
    """`json_schema` has its members in an object of that name there, and here beside its type."""
    form = request.text.format if request.text else None
    if form is None or form.get("type") != "json_schema":
        return form
    members = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": members}


def _stream_options(request: ResponseRequest) -> dict[str, Any] | None:
    options = request.stream_options
    return {"include_obfuscation": True} if options and options.include_obfuscation else None


def _cache_options(request: ResponseRequest | CompactRequest) -> dict[str, Any] | None:
    options = request.prompt_cache_options
    if options is None:
        return None
    return {name: value for name, value in msgspec.structs.asdict(options).items() if name != "prewarm"}


# --- errors --------------------------------------------------------------------------------------


def own_words(request: InputFields | None = None) -> contextlib.AbstractContextManager[None]:
    """Errors of the chat path, in the words of a response's `request`."""
    place_of = partial(_place_of, request.tools if request else None)
    return renamed(_NAMES, "input", {"max_tokens": "max_output_tokens", "messages": "input"}, place_of)


def _place_of(tools: Tools, param: str) -> str:
    """Which message an item has become is nobody's business; a tool stands where the client has put it."""
    param = _MESSAGE.sub("messages", param)
    param = _FUNCTION.sub(r"\1", param).replace(".format.grammar", ".format")
    if tools and (match := _TOOL.match(param)):
        path = next(islice(placed_tools(tools), int(match[1]), None)).path
        param = path + param[match.end() :]
    return param


# --- what is shown -------------------------------------------------------------------------------


def shown_fields(request: ResponseRequest, temperature: float, top_p: float) -> dict[str, Any]:
    """The request's part of the response object. What was not given shows what took its place."""
    return {
        "background": bool(request.background),
        "conversation": {"id": conversation} if (conversation := conversation_of(request)) else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": _shown_reasoning(request.reasoning),
        "safety_identifier": request.safety_identifier,
        "service_tier": "flex" if request.service_tier == "flex" else "default",  # the one that serves it
        "store": request.store is not False,
        "temperature": temperature,
        "text": _shown_text(request),
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": [_shown_tool(tool) for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": None, **tool} if tool["type"] in TOOL_TYPES else tool


def _shown_reasoning(given: ReasoningOptions | None) -> dict[str, Any]:
    options = given or ReasoningOptions()
    shown: dict[str, Any] = {"effort": options.effort, "summary": options.summary or options.generate_summary}
    return shown if options.context is None else shown | {"context": options.context}


def _shown_text(request: ResponseRequest) -> dict[str, Any]:
    text = request.text
    shown: dict[str, Any] = {"format": (text.format if text else None) or {"type": "text"}}
    if text and text.verbosity:
        shown["verbosity"] = text.verbosity
    return shown


class MakeResponse(msgspec.Struct, frozen=True):
    """What the record of a response is made of."""

    identity: str
    request: ResponseRequest
    items: bytes  # of its own input, a JSON array: encoded once, however often the conversation is cut to fit
    compacts: bool = False

    def own_name(self, field: str) -> str:
        return own_name(field, _NAMES)

    def record(self, sampling: SamplingParams) -> ResponseRecord:
        request = self.request
        shown = shown_fields(request, sampling.temperature, sampling.top_p)
        return ResponseRecord(
            shown=msgspec.json.encode(shown),
            items=self.items,
            previous=(request.previous_response_id or "")[-32:],
            store=request.store is not False,
            background=bool(request.background),
            conversation="" if is_prewarm(request) else conversation_of(request),
            compacts=self.compacts,
            prewarm=is_prewarm(request),
        )
