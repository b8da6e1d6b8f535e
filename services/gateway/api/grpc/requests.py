"""From protobuf requests to those that the REST API decodes from JSON. What is wrong with them is said there."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from services.gateway.api.grpc.generated import inference_pb2 as pb
from services.gateway.api.grpc.tools import calls_of, choice_of, format_of, object_in, tools_of
from services.gateway.core.errors import InvalidField, InvalidParameter, convert, missing
from services.gateway.intake.prompts.embeddings import EmbeddingRequest
from services.gateway.intake.schemas import ChatCompletionRequest, CompletionRequest, StreamOptions

MessageT = TypeVar("MessageT", bound=Protobuf)

_ROLES = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_DEVELOPER: "developer",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}
_KINDS = {pb.SPARSE_KIND_PAGES: "pages", pb.SPARSE_KIND_WINDOW: "window"}
_LISTS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
_USAGE = StreamOptions(include_usage=True)


def decode(kind: type[MessageT], data: bytes) -> MessageT:
    """Raises `InvalidParameter` for what is no such message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidParameter(
            f"The request is not a {kind.DESCRIPTOR.full_name} ({len(data)} bytes); build the client from the server's "
            "protobuf definitions.",
            param=None,
            reason="invalid_protobuf",
        ) from None


def fingerprint(request: Protobuf) -> str:
    """The same for requests that say the same, as far as protobuf tells."""
    return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).hexdigest()


def chat_request(given: pb.ChatRequest) -> ChatCompletionRequest:
    """Raises `InvalidParameter`."""
    fields = _fields(given.sampling)
    logprobs = fields.pop("logprobs", None)
    if logprobs is not None:
        fields["logprobs"], fields["top_logprobs"] = True, logprobs
    if given.HasField("tool_choice"):
        fields["tool_choice"] = choice_of(given.tool_choice)
    if given.HasField("chat_template_kwargs_json"):
        fields["chat_template_kwargs"] = object_in(
            given.chat_template_kwargs_json, "chat_template_kwargs", "variables for the chat template"
        )
    wanted = {
        "model": given.model,
        "messages": messages_of(given.messages),
        "tools": tools_of(given.tools),
        **_given(given, "prompt_cache_key", "parallel_tool_calls", "reasoning_effort"),
        **format_of(given),
        **_delivery(given.output),
        **_sparse(given),
        **fields,
    }
    return convert(wanted, ChatCompletionRequest)


def _given(message: Protobuf, *names: str) -> dict[str, Any]:
    """Those of the fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def completion_request(given: pb.GenerateRequest) -> CompletionRequest:
    """Raises `InvalidParameter`."""
    kind = given.WhichOneof("prompt")
    if kind is None:
        raise missing("prompt", "text or tokens")
    wanted = {
        "model": given.model,
        "prompt": given.text if kind == "text" else [list(given.tokens.ids)],
        **_given(given, "prompt_cache_key", "echo"),
        **format_of(given),
        **_delivery(given.output),
        **_sparse(given),
        **_fields(given.sampling),
    }
    return convert(wanted, CompletionRequest)


def _sparse(given: pb.ChatRequest | pb.GenerateRequest) -> dict[str, Any]:
    """The field of the REST API; a message without any field is `true` there."""
    if not given.HasField("sparse_attention"):
        return {}
    choice = given.sparse_attention
    fields = {descriptor.name: value for descriptor, value in choice.ListFields()}
    off = fields.pop("off", False)
    if off and fields:
        raise InvalidField(
            "sparse_attention.off", f"it cannot be combined with '{next(iter(fields))}'; leave out one of the two."
        )
    if "share" in fields:
        _check_number("sparse_attention.share", fields["share"])
    if "kind" in fields:
        fields["kind"] = _KINDS.get(choice.kind, f"SparseKind {choice.kind}")
    return {"sparse_attention": fields or not off}


def conversation_request(model: str, given: pb.Conversation) -> ChatCompletionRequest:
    """A chat of which only the prompt is wanted. Raises `InvalidParameter`."""
    wanted = {"model": model, "messages": messages_of(given.messages), "tools": tools_of(given.tools)}
    return convert(wanted, ChatCompletionRequest)


def messages_of(given: Sequence[pb.ChatMessage]) -> list[dict[str, Any]]:
    """A conversation. Raises `InvalidParameter` for a message that nobody says."""
    found = []
    for index, message in enumerate(given):
        role = _ROLES.get(message.role)
        if role is None:
            raise missing(f"messages[{index}].role", "one of the values of Role")
        fields = _given(message, "name", "tool_call_id")
        if message.HasField("reasoning"):
            fields["reasoning_content"] = message.reasoning
        calls = calls_of(message.tool_calls)
        content = (message.content or None) if calls else message.content
        found.append({"role": role, "content": content, "tool_calls": calls, **fields})
    return found


def _fields(sampling: pb.SamplingParameters) -> dict[str, Any]:
    """What is given: fields of the REST API, under the same names."""
    found: dict[str, Any] = {}
    for descriptor, value in sampling.ListFields():
        name = descriptor.name
        _check_number(name, value)
        if name == "logit_bias":
            found[name] = dict(value)
        else:
            found[name] = list(value) if name in _LISTS else value
    return found


def _check_number(name: str, value: Any) -> None:
    """JSON has no NaN, so the checks that follow do not look for it."""
    numbers = value.values() if name == "logit_bias" else (value,)
    if any(isinstance(number, float) and math.isnan(number) for number in numbers):
        raise InvalidField(name, "it is not a number; leave it out for the default.")


def _delivery(output: pb.OutputOptions) -> dict[str, Any]:
    return {} if output.whole else {"stream": True, "stream_options": _USAGE}


def embedding_request(given: pb.EmbedRequest) -> EmbeddingRequest:
    """Raises `InvalidParameter`."""
    inputs: list[Any] = []
    for index, item in enumerate(given.inputs):
        kind = item.WhichOneof("input")
        if kind is None:
            raise missing(f"inputs[{index}]", "text or tokens")
        inputs.append(item.text if kind == "text" else list(item.tokens.ids))
    wanted = {"model": given.model, "input": inputs, **_given(given, "dimensions")}
    return convert(wanted, EmbeddingRequest)
