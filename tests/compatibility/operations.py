"""What the official package can ask for, and what of it has no meaning on a server of one's own for text.

A resource that is added to the server needs nothing here: its operations and parameters are the package's. What
needs a value that no type tells goes to `samples.py`.
"""

import re
from typing import Any, NamedTuple

from openai.types import (
    Batch,
    Completion,
    CreateEmbeddingResponse,
    FileDeleted,
    FileObject,
    Model,
    ModelDeleted,
    Upload,
    batch_create_params,
    batch_list_params,
    completion_create_params,
    embedding_create_params,
    file_create_params,
    file_list_params,
    upload_create_params,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionDeleted
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.chat import completion_list_params as chat_list_params
from openai.types.chat import completion_update_params as chat_update_params
from openai.types.chat.completions import message_list_params
from openai.types.conversations import (
    Conversation,
    ConversationDeletedResource,
    conversation_create_params,
    conversation_update_params,
    item_create_params,
    item_list_params,
    item_retrieve_params,
)
from openai.types.fine_tuning import FineTuningJob, job_create_params, job_list_events_params, job_list_params
from openai.types.fine_tuning.jobs import checkpoint_list_params
from openai.types.responses import (
    CompactedResponse,
    Response,
    ResponseStreamEvent,
    input_item_list_params,
    response_compact_params,
    response_create_params,
    response_retrieve_params,
)
from openai.types.uploads import UploadPart

from services.executor.worker.stub import FAULT_TOKEN

HELLO = [{"role": "user", "content": "Hi"}]
FAULT = chr(FAULT_TOKEN)  # a prompt on which a stub engine with a fault fails: a token is a byte


class Operation(NamedTuple):
    """A method of the package."""

    name: str  # as in `client.chat.completions.create`
    method: str
    path: str  # `{...}`: an id that the set-up has made
    kinds: tuple[Any, ...] = ()  # the types of its parameters
    base: dict[str, Any] = {}  # the least that it takes
    form: str = ""  # the name of its file, where it is sent as a form
    answers: Any = None  # the type of its answer
    chunks: Any = None  # the type of a chunk of its stream
    events: Any = None  # the union of its stream's events
    # Changes of the least, whose answers show fields and events that no single parameter brings about.
    also: tuple[dict[str, Any], ...] = ()
    reasoning: tuple[dict[str, Any], ...] = ()  # the same for a model that reasons
    failing: tuple[dict[str, Any], ...] = ()  # the same for a server whose engine fails on `FAULT`
    cut: tuple[dict[str, Any], ...] = ()  # the same, streamed, for a server that ends in the middle
    in_query: tuple[str, ...] = ()  # parameters that are sent in the query although there is a body
    anew: str = ""  # what of the set-up is made again just before it


CHAT_TOOL = {"type": "function", "function": {"name": "x", "parameters": {"type": "object", "properties": {}}}}
RESPONSE_TOOL = {"type": "function", "name": "x", "strict": None, "parameters": {"type": "object", "properties": {}}}
# Its input is never empty, as a text's might be.
CUSTOM_TOOL = {
    "type": "custom",
    "name": "x",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]{4}"},
}
BATCH = {"input_file_id": "{file}", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
UPLOAD = {"bytes": 10, "filename": "x.txt", "mime_type": "text/plain", "purpose": "user_data"}
TUNING = {"model": "stub", "training_file": "{training_file}"}
OPERATIONS = (
    Operation(
        "chat.completions.create",
        "POST",
        "/chat/completions",
        (chat_create_params.CompletionCreateParamsNonStreaming, chat_create_params.CompletionCreateParamsStreaming),
        {"model": "stub", "messages": HELLO, "max_tokens": 4},
        answers=ChatCompletion,
        chunks=ChatCompletionChunk,
        also=(
            {"stream": True, "tools": [CHAT_TOOL], "tool_choice": "required", "max_tokens": 64},
            {"stream": True, "logprobs": True, "top_logprobs": 2},
            {"stream": True, "functions": [{"name": "x"}], "function_call": {"name": "x"}, "max_tokens": 64},
        ),
    ),
    Operation("chat.completions.retrieve", "GET", "/chat/completions/{chat}", answers=ChatCompletion),
    Operation(
        "chat.completions.update",
        "POST",
        "/chat/completions/{chat}",
        (chat_update_params.CompletionUpdateParams,),
        {"metadata": {"key": "value"}},
    ),
    Operation("chat.completions.list", "GET", "/chat/completions", (chat_list_params.CompletionListParams,)),
    Operation(
        "chat.completions.messages.list",
        "GET",
        "/chat/completions/{chat}/messages",
        (message_list_params.MessageListParams,),
    ),
    Operation("chat.completions.delete", "DELETE", "/chat/completions/{chat}", answers=ChatCompletionDeleted),
    Operation(
        "completions.create",
        "POST",
        "/completions",
        (
            completion_create_params.CompletionCreateParamsNonStreaming,
            completion_create_params.CompletionCreateParamsStreaming,
        ),
        {"model": "stub", "prompt": "Hi", "max_tokens": 4},
        answers=Completion,
        chunks=Completion,
    ),
    Operation(
        "responses.create",
        "POST",
        "/responses",
        (response_create_params.ResponseCreateParamsNonStreaming, response_create_params.ResponseCreateParamsStreaming),
        {"model": "stub", "input": "Hi", "max_output_tokens": 16},
        answers=Response,
        events=ResponseStreamEvent,
        also=(
            {"stream": True},
            {"stream": True, "text": {"format": {"type": "json_object"}}, "max_output_tokens": 64},
            {"stream": True, "tools": [RESPONSE_TOOL], "tool_choice": "required", "max_output_tokens": 64},
            {"stream": True, "background": True},
            {"stream": True, "input": [*HELLO, {"type": "compaction_trigger"}]},
            {"stream": True, "tools": [CUSTOM_TOOL], "tool_choice": "required", "max_output_tokens": 128},
        ),
        reasoning=({"stream": True, "input": "<think>", "reasoning": {"summary": "auto"}},),
        failing=({"stream": True, "input": FAULT},),
        cut=({"stream": True, "max_output_tokens": 4000},),
    ),
    Operation(
        "conversations.create",
        "POST",
        "/conversations",
        (conversation_create_params.ConversationCreateParams,),
        {"metadata": {"key": "value"}},
        answers=Conversation,
    ),
    Operation("conversations.retrieve", "GET", "/conversations/{conversation}", answers=Conversation),
    Operation(
        "conversations.update",
        "POST",
        "/conversations/{conversation}",
        (conversation_update_params.ConversationUpdateParams,),
        {"metadata": {"key": "value"}},
        answers=Conversation,
    ),
    Operation(
        "conversations.items.create",
        "POST",
        "/conversations/{conversation}/items",
        (item_create_params.ItemCreateParams,),
        {"items": HELLO},
        in_query=("include",),
    ),
    Operation(
        "conversations.items.list", "GET", "/conversations/{conversation}/items", (item_list_params.ItemListParams,)
    ),
    Operation(
        "conversations.items.retrieve",
        "GET",
        "/conversations/{conversation}/items/{conversation_item}",
        (item_retrieve_params.ItemRetrieveParams,),
    ),
    Operation("conversations.items.delete", "DELETE", "/conversations/{conversation}/items/{conversation_item}"),
    Operation("conversations.delete", "DELETE", "/conversations/{conversation}", answers=ConversationDeletedResource),
    Operation(
        "responses.compact",
        "POST",
        "/responses/compact",
        (response_compact_params.ResponseCompactParams,),
        {"model": "stub", "input": "Hi"},
        answers=CompactedResponse,
    ),
    Operation(
        "responses.retrieve",
        "GET",
        "/responses/{response}",
        (response_retrieve_params.ResponseRetrieveParamsBase,),
        answers=Response,
    ),
    Operation(
        "responses.input_items.list",
        "GET",
        "/responses/{response}/input_items",
        (input_item_list_params.InputItemListParams,),
    ),
    Operation("responses.cancel", "POST", "/responses/{background}/cancel", answers=Response),
    Operation("responses.delete", "DELETE", "/responses/{response}"),
    Operation(
        "embeddings.create",
        "POST",
        "/embeddings",
        (embedding_create_params.EmbeddingCreateParams,),
        {"model": "stub", "input": "Hi"},
        answers=CreateEmbeddingResponse,
    ),
    Operation("models.list", "GET", "/models"),
    Operation("models.retrieve", "GET", "/models/stub", answers=Model),
    Operation("models.delete", "DELETE", "/models/registered", answers=ModelDeleted),
    Operation(
        "files.create",
        "POST",
        "/files",
        (file_create_params.FileCreateParams,),
        {"purpose": "batch"},
        form="file",
        answers=FileObject,
    ),
    Operation("files.retrieve", "GET", "/files/{file}", answers=FileObject),
    Operation("files.list", "GET", "/files", (file_list_params.FileListParams,)),
    Operation("files.content", "GET", "/files/{file}/content"),
    Operation("batches.create", "POST", "/batches", (batch_create_params.BatchCreateParams,), BATCH, answers=Batch),
    Operation("batches.retrieve", "GET", "/batches/{batch}", answers=Batch),
    Operation("batches.list", "GET", "/batches", (batch_list_params.BatchListParams,)),
    Operation("batches.cancel", "POST", "/batches/{long}/cancel", answers=Batch, anew="long"),
    Operation("uploads.create", "POST", "/uploads", (upload_create_params.UploadCreateParams,), UPLOAD, answers=Upload),
    Operation("uploads.parts.create", "POST", "/uploads/{upload}/parts", form="data", answers=UploadPart),
    Operation("uploads.complete", "POST", "/uploads/{upload}/complete", base={"part_ids": ["{part}"]}, answers=Upload),
    Operation("uploads.cancel", "POST", "/uploads/{cancelled}/cancel", answers=Upload),
    Operation("files.delete", "DELETE", "/files/{file}", answers=FileDeleted),
    Operation("fine_tuning.jobs.retrieve", "GET", "/fine_tuning/jobs/{tuned}", answers=FineTuningJob),
    Operation("fine_tuning.jobs.list", "GET", "/fine_tuning/jobs", (job_list_params.JobListParams,)),
    Operation(
        "fine_tuning.jobs.list_events",
        "GET",
        "/fine_tuning/jobs/{tuned}/events",
        (job_list_events_params.JobListEventsParams,),
    ),
    Operation(
        "fine_tuning.jobs.checkpoints.list",
        "GET",
        "/fine_tuning/jobs/{tuned}/checkpoints",
        (checkpoint_list_params.CheckpointListParams,),
    ),
    Operation(
        "fine_tuning.jobs.create",
        "POST",
        "/fine_tuning/jobs",
        (job_create_params.JobCreateParams,),
        TUNING,
        answers=FineTuningJob,
        also=({"method": {"type": "dpo"}},),
    ),
    Operation("fine_tuning.jobs.pause", "POST", "/fine_tuning/jobs/{waiting}/pause", anew="waiting"),
    Operation("fine_tuning.jobs.resume", "POST", "/fine_tuning/jobs/{waiting}/resume"),
    Operation("fine_tuning.jobs.cancel", "POST", "/fine_tuning/jobs/{waiting}/cancel"),
)

TRAINING_FILE = b'{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello."}]}\n' * 10
BATCH_FILE = (
    b'{"custom_id":"1","method":"POST","url":"/v1/chat/completions",'
    b'"body":{"model":"stub","messages":[{"role":"user","content":"Hi"}],"max_tokens":4}}\n'
)
# Of a batch that is under way for a while.
LONG_FILE = b"".join(BATCH_FILE.replace(b'"1"', b'"%d"' % number) for number in range(2000))
# (name, method, path, body): whose ids stand in paths and bodies, made in this order.
SETUP: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("registered", "PUT", "/registry/models/registered", {"source": "org/a-model"}),
    (
        "chat",
        "POST",
        "/chat/completions",
        {"model": "stub", "messages": HELLO, "max_tokens": 4, "store": True, "metadata": {"key": "value"}},
    ),
    ("response", "POST", "/responses", {"model": "stub", "input": "Hi", "max_output_tokens": 16}),
    ("background", "POST", "/responses", {"model": "stub", "input": "Hi", "max_output_tokens": 16, "background": True}),
    ("conversation", "POST", "/conversations", {"items": HELLO}),
    ("file", "POST", "/files", {"purpose": "batch"}),
    ("upload", "POST", "/uploads", UPLOAD | {"bytes": len(BATCH_FILE)}),
    ("part", "POST", "/uploads/{upload}/parts", {}),
    ("cancelled", "POST", "/uploads", UPLOAD),
    ("batch", "POST", "/batches", BATCH),
    ("long_file", "POST", "/files", {"purpose": "batch"}),
    ("long", "POST", "/batches", BATCH | {"input_file_id": "{long_file}"}),
    ("training_file", "POST", "/files", {"purpose": "fine-tune"}),
    ("tuned", "POST", "/fine_tuning/jobs", TUNING | {"hyperparameters": {"n_epochs": 3}, "metadata": {"key": "value"}}),
    ("waiting", "POST", "/fine_tuning/jobs", TUNING),
)

IN_PATH = ("conversation_id",)  # parameters that stand in a path, which some types list too
REASONS = r"(^|\.)(reasoning_effort|effort|verbosity)$"  # parameters of models whose chat template knows them
_BUILT_IN = (
    "additional_tools|apply_patch|code_interpreter|computer|configuration_update|file_search|image_generation|"
    "local_shell|mcp|program|programmatic_tool_calling|shell|tool_search|web_search"
)
# (pattern of "operation path", why it has no meaning here). Tried out all the same: they must not be ignored.
#
# What this server merely does not do is not among them, and counts against it: see `REFUSED`.
EXCLUDED: tuple[tuple[str, str], ...] = (
    (r"image", "images: the models that are served read and write text"),
    (r"audio|voice", "audio: the models that are served read and write text"),
    (rf"type=[a-z_.]*({_BUILT_IN})", "tools that run at OpenAI, or that its models alone are trained to call"),
    (r" (web_search_options|max_tool_calls)", "tools that run at OpenAI"),
    (r"url_citation|annotations\[\]|annotation\.added", "what OpenAI's tools cite, of which there are none here"),
    (
        r"type=response\.refusal",
        "said in a channel of its own by OpenAI's models; those that are served refuse in words, as an ordinary text",
    ),
    (r"moderation", "a service of OpenAI's, with models of its own"),
    (r"encrypted_content", "sealed by OpenAI, to be opened there"),
    (r"^responses.create (access_programs|prompt)($|[.\[])", "programmes and templates that are kept at OpenAI"),
)
# (pattern of "operation path", why it is not taken) for each that has a meaning and is refused, wholly or in part.
REFUSED: tuple[tuple[str, str], ...] = (
    (
        r"file_url",
        "a server that fetches what clients name lets them reach whatever it reaches; send the file, or upload it",
    ),
    (r"\basync$", "a tool's result is awaited: no model that is served was trained to go on before it"),
    (r"allowed_callers", "nothing but the model calls a tool here: `programmatic` is a program that runs at OpenAI"),
    (
        r"grammar\]\.(grammar\.)?syntax",
        "models write the input of a tool as a JSON text, which a grammar in Lark's notation does not describe",
    ),
    (r"^conversations\S* items\[type=compaction_trigger\]", "it asks for a response, which adding items is not"),
    (r"comparison_response_id", "what of another prompt's blocks is left is known to the ring alone, and not told"),
    (r"^completions.create suffix", "no open model says how it was taught to fill in the middle"),
    (r" modalities", "audio: the models that are served read and write text"),
    (
        r"^fine_tuning.jobs.create (method\.reinforcement|method\.type$)",
        "reinforcement fine-tuning, which trains on graders' verdicts: `supervised` and `dpo` are there",
    ),
    (
        r"^fine_tuning.jobs.create integrations",
        "a server that sends what it trains to another service; events and result files have a job's metrics",
    ),
)


def why_excluded(operation: str, path: str) -> str:
    """Empty where the parameter has a meaning here."""
    return _reason(EXCLUDED, operation, path)


def why_refused(operation: str, path: str) -> str:
    """Of one that has a meaning here; empty where no reason is known."""
    return _reason(REFUSED, operation, path)


def _reason(reasons: tuple[tuple[str, str], ...], operation: str, path: str) -> str:
    return next((reason for pattern, reason in reasons if re.search(pattern, f"{operation} {path}")), "")
