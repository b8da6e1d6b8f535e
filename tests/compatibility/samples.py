"""Requests that try out one parameter each, made from the parameters' types."""

import base64
import copy
import re
from typing import Any

from tests.compatibility.operations import CHAT_TOOL, RESPONSE_TOOL
from tests.compatibility.walk import Parameter, Step, bare, element, fields_of, is_object, literals, members, required

SUMMARY = base64.b64encode(b'{"summary":"x"}').decode()
# By path: what to send where a value that fits the type alone would not do.
VALUES: dict[str, Any] = {
    r"(^|\.)model$": "stub",
    r"(^|\.)stop$": ["\n\n"],
    r"(^|\.)temperature$": 0.5,
    r"(^|\.)top_p$": 0.5,
    r"(^|\.)logit_bias$": {"97": -1},
    r"(^|\.)metadata$": {"key": "value"},
    r"^context_management\[\]\.type$": "compaction",
    r"(^|\.)(parameters|schema)$": {"type": "object", "properties": {}, "additionalProperties": False},
    r"syntax$": "regex",
    r"definition$": "[a-z]+",
    r"allowed_tools\.tools$": [{"type": "function", "function": {"name": "x"}}],
    r"tool_choice\[type=allowed_tools\]\.tools$": [{"type": "function", "name": "x"}],
    r"^dimensions$": 8,
    r"^(training|validation)_file$": "{training_file}",
    r"expires_after\.seconds$": 3600,
    r"^(max_output_tokens|max_tokens|max_completion_tokens)$": 16,
    r"^best_of$": 2,
    r"^suffix$": "end",
    r"^background$": False,
    r"^modalities$": ["text"],
    r"(^|\.)(image_url|url|file_url|server_url)$": "https://example.invalid/x.png",
    r"^previous_response_id$": "{response}",
    r"^conversation(\.id)?$": "{conversation}",
    r"item_reference\]\.id$": "{item}",
    r"(^|\.)call_id$": "x",
    r"^include$": ["message.output_text.logprobs"],
    r"(^|\.)arguments$": "{}",
    r"(^|\.)file_data$": "data:text/plain;base64,SGk=",
    r"(^|\.)file_id$": "{file}",
    r"type=compaction\]\.encrypted_content$": SUMMARY,
    r"^bytes$": 10,
    r"^(filename|mime_type)$": "text/plain",
}

# By member of a union: what it needs although its type does not say so.
MINIMAL: dict[str, dict[str, Any]] = {
    "role=assistant": {"role": "assistant", "content": "x"},
    "role=function": {"role": "function", "name": "x", "content": "x"},
    "type=compaction": {"type": "compaction", "encrypted_content": SUMMARY},
    "type=input_file": {"type": "input_file", "file_data": "data:text/plain;base64,SGk="},
}

# By name of a TypedDict: what it needs although its type does not say so.
ALSO: dict[str, dict[str, Any]] = {
    "JSONSchema": {"schema": {"type": "object", "properties": {}, "additionalProperties": False}},
    "FunctionCallOutput": {"call_id": "x"},
    "ContextManagement": {"type": "compaction"},
    "FileFile": {"file_data": "data:text/plain;base64,SGk="},
}

_CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "x", "type": "function", "function": {"name": "x", "arguments": "{}"}}],
}
_RESULT = {"role": "tool", "tool_call_id": "x", "content": "x"}
_ITEM = {"type": "function_call", "call_id": "x", "name": "x", "arguments": "{}"}
_OUTPUT = {"type": "function_call_output", "call_id": "x", "output": "x"}
_CUSTOM_ITEM = {"type": "custom_tool_call", "call_id": "x", "name": "x", "input": "x"}
_CUSTOM_OUTPUT = {"type": "custom_tool_call_output", "call_id": "x", "output": "x"}
_SAID = {"role": "user", "content": "Hi"}
# (pattern, what comes before, what comes after) in a conversation where a message alone would make no sense.
AROUND: tuple[tuple[str, list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    (r"^messages\[role=assistant\]\.tool_calls", [_SAID], [_RESULT]),
    (r"^messages\[role=tool\]", [_SAID, _CALL], []),
    (r"^(input|items)\[type=function_call\]", [_SAID], [_OUTPUT]),
    (r"^(input|items)\[type=function_call_output\]", [_SAID, _ITEM], []),
    (r"^(input|items)\[type=custom_tool_call\]", [_SAID], [_CUSTOM_OUTPUT]),
    (r"^(input|items)\[type=custom_tool_call_output\]", [_SAID, _CUSTOM_ITEM], []),
    (r"^(input|items)\[type=reasoning\]", [_SAID], [_SAID]),
    (r"^(input|items)\[type=compaction_trigger\]", [_SAID], []),
)

# By operation: what stands beside a parameter that is of no use alone.
BESIDE: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "chat.completions.create": [
        (r"^stream_options", {"stream": True}),
        (r"^top_logprobs", {"logprobs": True}),
        (r"^(tool_choice|parallel_tool_calls)", {"tools": [CHAT_TOOL]}),
        (r"^tool_choice\[type=custom\]", {"tools": [{"type": "custom", "custom": {"name": "x"}}]}),
        (r"^function_call", {"functions": [{"name": "x"}]}),
        (r"^(tools|functions|function_call|tool_choice|response_format)", {"max_tokens": 64}),
        (r"^max_completion_tokens", {"max_tokens": None}),
        (r"^audio", {"modalities": ["text", "audio"]}),
    ],
    "completions.create": [(r"^stream_options", {"stream": True}), (r"^best_of", {"n": 2})],
    "fine_tuning.jobs.create": [
        (r"^method\.dpo", {"method": {"type": "dpo"}}),
        (r"^method\.reinforcement", {"method": {"type": "reinforcement"}}),
    ],
    "responses.create": [
        (r"^stream_options", {"stream": True}),
        (r"^(tool_choice|parallel_tool_calls|max_tool_calls)", {"tools": [RESPONSE_TOOL]}),
        (r"^tool_choice\[type=custom\]", {"tools": [{"type": "custom", "name": "x"}]}),
        (r"^(tools|tool_choice|text)", {"max_output_tokens": 64}),
        (r"^top_logprobs", {"include": ["message.output_text.logprobs"]}),
    ],
}


# By operation and field of its query: what makes sense there.
QUERIES: dict[tuple[str, str], Any] = {
    ("batches.list", "after"): "{batch}",
    ("files.list", "after"): "{file}",
    ("chat.completions.list", "after"): "{chat}",
    ("chat.completions.messages.list", "after"): "{chat}-0",
    ("files.list", "purpose"): "batch",
    ("responses.input_items.list", "after"): "{input_item}",
    ("conversations.items.list", "after"): "{conversation_item}",
    ("responses.retrieve", "starting_after"): 0,
    ("fine_tuning.jobs.list", "after"): "{tuned}",
    ("fine_tuning.jobs.list_events", "after"): "{tuning_event}",
    ("fine_tuning.jobs.checkpoints.list", "after"): "{checkpoint}",
}
# By the same: what stands beside one that is of no use alone.
QUERY_BESIDE: dict[tuple[str, str], dict[str, Any]] = {("responses.retrieve", "starting_after"): {"stream": "true"}}


def sample(path: str, kind: Any, depth: int = 0) -> Any:
    """A value of `kind` for the parameter `path`."""
    for pattern, value in VALUES.items():
        if re.search(pattern, path):
            return copy.deepcopy(value)
    choices = members(kind)
    simple = [one for one in choices if one in (str, bool, int, float)]
    if simple and not literals(kind):
        return {str: "x", bool: True, int: 1, float: 1.0}[simple[0]]
    if values := literals(kind):
        return values[0]
    for one in choices:
        if is_object(one):
            return minimal(one, path, depth)
        if (inner := element(one)) is not None:
            return [sample(path + "[]", inner, depth + 1)]
    return {}


def minimal(kind: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """The fields that a TypedDict must have."""
    hints = fields_of(kind)
    for name in ("type", "role"):
        for value in literals(hints.get(name, Any))[:1]:
            if known := MINIMAL.get(f"{name}={value}"):
                return dict(known)
    if depth > 6:
        return {}
    made = {name: sample(f"{path}.{name}", bare(hints[name]), depth + 1) for name in sorted(required(kind))}
    return made | copy.deepcopy(ALSO.get(kind.__name__, {}))


def values_for(operation: str, base: dict[str, Any], parameter: Parameter) -> list[Any]:
    """What to try a parameter with: all values that its type lists, alone or in an array, since the first may be the
    one that asks for nothing; else one that fits."""
    if not parameter.parents and isinstance(base.get(parameter.name), str):
        return [base[parameter.name]]
    for one in members(parameter.kind):
        inner = element(one)
        if inner is not None and (values := literals(inner)) and str not in members(inner):
            return [[value] for value in values]
    listed = list(literals(parameter.kind))
    beside_text = any(one is str for one in members(parameter.kind))
    if listed and not beside_text and not parameter.names_its_member:
        return listed
    return [sample(parameter.path, parameter.kind)]


def request_for(operation: str, base: dict[str, Any], parameter: Parameter, value: Any) -> dict[str, Any]:
    """A request of `operation`, `base` but for `parameter`, which is `value`, and what it needs beside it."""
    body = copy.deepcopy(base)
    for pattern, beside in BESIDE.get(operation, []):
        if re.search(pattern, parameter.path):
            body |= copy.deepcopy(beside)
    holder = body
    for step in parameter.parents:
        holder = _enter(holder, step, parameter.path)
    holder[parameter.name] = copy.deepcopy(value)
    if parameter.name in ("file_id", "file_url"):
        holder.pop("file_data", None)  # one of them says where the file is
    for pattern, before, after in AROUND:
        if re.search(pattern, parameter.path):
            body[parameter.top] = [*before, *body[parameter.top], *after]
    return {name: value for name, value in body.items() if value is not None}


def _enter(holder: dict[str, Any], step: Step, path: str) -> dict[str, Any]:
    beside = holder.get(step.name)
    made = minimal(step.member, path.rpartition(".")[0]) | (beside if isinstance(beside, dict) else {})
    holder[step.name] = [made] if step.is_list else made
    return made
