"""For schemathesis: puts what only this gateway knows into its requests, so that they reach the ring.

A document cannot say which models and generations there are, how large a vocabulary is, or which keys were used
before, what a valid grammar, JSON Schema or tool call is, and which messages may follow which: most valid
requests get values that fit, and those fields are left to tests of their own; the rest stays as it was generated.
"""

import itertools
import os
import re
from typing import Any

import schemathesis
from schemathesis import Case, GenerationMode, HookContext, Response

MODEL = os.environ.get("RYZANSTEIN_FUZZED_MODEL", "stub")
VOCABULARY = 256
DEEP = (
    *(
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "tool_calls",
        "parallel_tool_calls",
        "reasoning_effort",
    ),
    *(
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    ),
    *("chat_template_kwargs", "text", "reasoning", "service_tier"),
)
"""Fields whose values have a language of their own."""
_ID = re.compile(rb'"id":"((?:chatcmpl-|cmpl-|resp_)[0-9a-f]{32})"')
_count = itertools.count()
_generations: list[str] = []


@schemathesis.hook
def map_case(context: HookContext, case: Case) -> Case:
    number = next(_count)
    meta = case.meta
    if meta is None or meta.generation.mode != GenerationMode.POSITIVE:
        return case
    if case.headers and "Idempotency-Key" in case.headers:
        case.headers["Idempotency-Key"] = f"{case.headers['Idempotency-Key'][:200]}-{os.getpid()}-{number}"
    if isinstance(case.body, dict) and "model" in case.body:
        case.body = shallow(whole_numbers(case.body))
        if number % 4 or case.body["model"] == MODEL:
            case.body = fitting(case.body)
    _know_places(case, number)
    return case


def _know_places(case: Case, number: int) -> None:
    """Ids that there are, and no positions in a text that nobody knows beforehand."""
    case.headers.pop("Last-Event-ID", None)
    for name in ("after", "starting_after"):
        case.query.pop(name, None)
    for name in ("generation", "response"):
        known = [item for item in _generations if item.startswith("resp_") == (name == "response")]
        if name in case.path_parameters and known and number % 4:
            case.path_parameters[name] = known[number % len(known)]


@schemathesis.hook
def after_call(context: HookContext, case: Case, response: Response) -> None:
    """Remembers the generations that have begun."""
    _generations.extend(name.decode() for name in _ID.findall(response.content)[:1])
    del _generations[:-64]


def whole_numbers(value: Any) -> Any:
    """44.0 as 44: to JSON Schema both are integers; the API wants them written as such."""
    if isinstance(value, dict):
        return {name: whole_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def shallow(body: dict[str, Any]) -> dict[str, Any]:
    """`body` without what only its own checks know to be valid."""
    body = {name: value for name, value in body.items() if name not in DEEP}
    if body.pop("previous_response_id", None) is not None or isinstance(body.get("input"), list):
        body["input"] = "Hi"
    if isinstance(body.get("messages"), list):
        body["messages"] = [_plain(message) for message in body["messages"]]
    return body


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in (*DEEP, "tool_call_id")}
    role = "user" if kept["role"] in ("tool", "function") else kept["role"]
    return kept | {"role": role, "content": "Hi" if kept.get("content") is None else kept["content"]}


def fitting(body: dict[str, Any]) -> dict[str, Any]:
    """`body` for the model that is there."""
    body = body | {"model": MODEL}
    body.pop("max_completion_tokens", None)
    for name, most in (("max_tokens", 64), ("min_tokens", 1), ("n", 2), ("max_output_tokens", 64)):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], most)
    if body.get("stop_token_ids"):
        body["stop_token_ids"] = [token % VOCABULARY for token in body["stop_token_ids"]]
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(key) % VOCABULARY): bias for key, bias in body["logit_bias"].items()}
    if isinstance(body.get("prompt"), list):
        body["prompt"] = [_known(item) for item in body["prompt"][:8]]
    return body


def _known(item: Any) -> Any:
    if isinstance(item, list):
        return [_known(token) for token in item]
    return item % VOCABULARY if isinstance(item, int) else item
