"""For schemathesis: puts what only this gateway knows into its requests, so that they reach the ring.

A document cannot say which models, generations, files and batches there are, how large a vocabulary is, or which
keys were used before, what a valid grammar, JSON Schema or tool call is, and which messages may follow which: most
valid requests get values that fit, and those fields are left to tests of their own; the rest stays as it was
generated.
"""

import itertools
import os
import re
from typing import Any

import schemathesis
from schemathesis import Case, GenerationMode, HookContext, Response

FILE = os.environ.get("RYZANSTEIN_FUZZED_FILE", "")  # the input of a batch
MODEL = os.environ.get("RYZANSTEIN_FUZZED_MODEL", "stub")
VOCABULARY = 256
# Fields whose values have a language of their own.
DEEP = (
    *("tools", "tool_choice", "functions", "function_call", "tool_calls", "parallel_tool_calls", "reasoning_effort"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("chat_template_kwargs", "text", "reasoning", "service_tier", "verbosity"),
    *("format", "think", "raw", "instruction", "sparse_attention"),
)
# Paths whose requests need not name the model where one is served.
NAMELESS = (
    *("/v1/chat/completions", "/v1/classify", "/v1/completions", "/v1/embeddings", "/v1/messages"),
    *("/v1/rerank", "/v1/responses", "/v1/score"),
)
_ID = re.compile(rb'"id":"((?:chatcmpl-|cmpl-|msg_|msgbatch_|resp_|file-|batch_)[0-9a-f]{24,32}[a-z]*)"')
# How the ids begin that a part of a path may be.
KINDS = {
    "generation": ("chatcmpl-", "cmpl-", "msg_"),
    "response": ("resp_",),
    "file": ("file-",),
    "batch": ("batch_",),
    "message_batch": ("msgbatch_",),
}
_count = itertools.count()
_seen: list[str] = []


@schemathesis.hook
def map_case(context: HookContext, case: Case) -> Case:
    number = next(_count)
    meta = case.meta
    if meta is None or meta.generation.mode != GenerationMode.POSITIVE:
        return _of_nobody(case)
    if case.headers and "Idempotency-Key" in case.headers:
        case.headers["Idempotency-Key"] = f"{case.headers['Idempotency-Key'][:200]}-{os.getpid()}-{number}"
    if isinstance(case.body, dict) and case.media_type == "application/json":
        case.body = shallow(whole_numbers(case.body))
        if number % 4 or case.body.get("model") in (None, MODEL):
            case.body = fitting(case.body)
        _fit_endpoint(case.path, case.body, number)
    if case.path.startswith("/v1/registry/models/"):
        _fit_registry(case, number)
    if case.path.startswith("/api/") and isinstance(case.body, dict):
        case.body = _fit_ollama(case.path, case.body, number)
    if "lora" in case.path and isinstance(case.body, dict):
        case.body = _fit_adapter(case.path, number)
    if "session" in case.path_parameters:  # a path has no slashes in its parts
        case.path_parameters["session"] = f"session {number % 5}"
    if "adapter" in case.path_parameters:
        case.path_parameters["adapter"] = f"adapter-{number % 5}"
    _know_places(case, number)
    return case


def _fit_registry(case: Case, number: int) -> None:
    """Names and sources that may be, and no revision that nobody knows beforehand."""
    for name in ("If-Match", "If-None-Match"):
        case.headers.pop(name, None)
    if isinstance(case.body, dict):
        case.path_parameters["model"] = f"model-{number % 5}"
        case.body = {"source": f"org/model-{number % 7}", "least": number % 2}


def _fit_adapter(path: str, number: int) -> dict[str, Any]:
    """Names and sources that may be, of a base that no host could be asked for: there is none."""
    if path.startswith("/v1/loras/"):
        return {"source": "org/adapter", "model": "nobody"}
    if path == "/v1/unload_lora_adapter":
        return {"lora_name": f"adapter-{number % 5}"}
    return {"lora_name": f"adapter-{number % 5}", "lora_path": "org/adapter", "model": "nobody"}


def _fit_ollama(path: str, body: dict[str, Any], number: int) -> dict[str, Any]:
    """Names of models that may be, and no adapters, which no host could be asked for: there is none."""
    if path == "/api/copy":
        return {"source": MODEL, "destination": f"model-{number % 5}"}
    if path == "/api/create":
        return {"model": f"model-{number % 5}", "from": MODEL}
    body.pop("dimensions", None)  # the model has few
    if isinstance(body.get("options"), dict):
        body["options"].pop("sparse_attention", None)
    if path == "/api/embed" and number % 4:
        return body | {"input": "Hi"}
    if isinstance(body.get("messages"), list):
        body["messages"] = body["messages"][:8]  # the context is short
    return body


def _of_nobody(case: Case) -> Case:
    """A case that is wrong somewhere, perhaps in a header that nobody looks at: it is not to be answered because its
    model need not be named."""
    if case.path in NAMELESS and isinstance(case.body, dict) and case.body.get("model") is None:
        case.body["model"] = "nobody"
    return case


def _fit_endpoint(path: str, body: dict[str, Any], number: int) -> None:
    """What the body of one endpoint alone has."""
    if path == "/v1/chat/completions" and number % 2:
        body["store"] = True
    if path.startswith("/v1/responses"):
        _fit_response(path, body)
    if path.startswith("/v1/conversations") and body.get("items") is not None:
        body["items"] = [{"role": "user", "content": "Hi"}]
    if path == "/v1/uploads":
        body |= {"bytes": 1 + number % 100, "filename": "a.txt", "expires_after": None}
    if path.endswith(("/rerank", "/score")):
        _fit_pairs(body)
    if path.startswith("/v1/messages"):
        _fit_messages(body, number)
    if path == "/v1/fine_tuning/jobs":
        body |= {"integrations": None, "method": None, "replicas": 1}  # what fits what is said in words
        body.pop("lora", None)
    if path == "/v1/batches":
        if number % 4:
            body["input_file_id"] = FILE
        body["completion_window"] = f"{1 + number % 7}{'smhd'[number % 4]}"  # the most of it is a setting


def _fit_response(path: str, body: dict[str, Any]) -> None:
    """What is before it is not known; to shorten a conversation there must be one."""
    before = [body.pop(name, None) for name in ("previous_response_id", "conversation")]
    body.pop("context_management", None)
    given = body.get("input")
    if any(one is not None for one in before) or isinstance(given, list):
        body["input"] = "Hi"
    if path == "/v1/responses/compact" and given is None:
        body["input"] = "Hi"


def _fit_pairs(body: dict[str, Any]) -> None:
    """Few texts, as many as belong together, and the query longer than what is cut to."""
    body.pop("truncate_prompt_tokens", None)
    for name in ("text_1", "text_2", "queries", "documents"):
        if isinstance(body.get(name), list):
            body[name] = body[name][:1] if name in ("text_1", "queries") else body[name][:4]
    if isinstance(body.get("top_n"), int):
        body["top_n"] %= 2


def _fit_messages(body: dict[str, Any], number: int) -> None:
    """Turns that may follow each other; the requests of a batch are for one model, under names of their own."""
    body.pop("thinking", None)
    body.pop("output_config", None)
    if isinstance(body.get("system"), list):
        body["system"] = "Hi"  # the context is short
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": "Hi"}] * (1 + number % 3)
    for index, request in enumerate(body.get("requests") or []):
        request["custom_id"] = f"{number}-{index}"
        request["params"] = fitting(shallow(request["params"]) | {"model": MODEL, "stream": None})
        _fit_messages(request["params"], number)


def _know_places(case: Case, number: int) -> None:
    """Ids that there are, and no positions in a text that nobody knows beforehand."""
    case.headers.pop("Last-Event-ID", None)
    for name in ("after", "starting_after"):
        case.query.pop(name, None)
    for name, beginnings in KINDS.items():
        known = [item for item in _seen if item.startswith(beginnings)]
        if name in case.path_parameters and known and number % 4:
            case.path_parameters[name] = known[number % len(known)]


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Keeps the input of the batches, which schemathesis finds in lists; completes no upload, whose parts it does not
    know."""
    if case.path.endswith("/complete"):
        case.path_parameters["upload"] = f"upload_{0:024x}"
    if case.method == "DELETE" and case.path_parameters.get("file") == FILE:
        case.path_parameters["file"] = "file-0"


@schemathesis.hook
def after_call(context: HookContext, case: Case, response: Response) -> None:
    """Remembers what has been made."""
    _seen.extend(name.decode() for name in _ID.findall(response.content)[:1] if name.decode() != FILE)
    del _seen[:-64]


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
    if isinstance(body.get("messages"), list):
        body["messages"] = [_plain(message) for message in body["messages"]]
        if "input" in body or "dimensions" in body:  # of embeddings, for which all parts together may be too long
            body["messages"] = [{"role": "user", "content": "Hi"}]
    return body


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name not in (*DEEP, "tool_call_id")}
    role = "user" if kept["role"] in ("tool", "function") else kept["role"]
    content = kept.get("content")
    is_text = isinstance(content, str) or (content and all(part.get("file") is None for part in content))
    return kept | {"role": role, "content": content if is_text else "Hi"}


MOST = {
    "max_tokens": 64,
    "max_output_tokens": 64,
    "min_tokens": 1,
    "n": 2,
    "dimensions": 4,
    "truncate_prompt_tokens": 64,
}


def fitting(body: dict[str, Any]) -> dict[str, Any]:
    """`body` for the model that is there."""
    body = body | ({"model": MODEL} if "model" in body else {})
    for name in ("max_completion_tokens", "prompt_name"):
        body.pop(name, None)
    for name, most in MOST.items():
        if isinstance(body.get(name), int):
            body[name] = min(body[name], most)
    if body.get("best_of"):
        body["best_of"] = body.get("n") or 1
    if body.get("continue_final_message"):
        body["messages"] = [*(body.get("messages") or []), {"role": "assistant", "content": "Hi"}]
    return _with_known_tokens(body)


def _with_known_tokens(body: dict[str, Any]) -> dict[str, Any]:
    """`body` with ids of the vocabulary alone."""
    for name in ("stop_token_ids", "allowed_token_ids", "tokens", "prompt", "input"):
        if isinstance(body.get(name), list):
            body[name] = [_known(item) for item in body[name][:8]]
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(key) % VOCABULARY): bias for key, bias in body["logit_bias"].items()}
    return body


def _known(item: Any) -> Any:
    if isinstance(item, list):
        return [_known(token) for token in item]
    return item % VOCABULARY if isinstance(item, int) else item
