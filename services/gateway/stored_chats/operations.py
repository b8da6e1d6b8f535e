"""The operations of stored chat completions, for their routes and the OpenAPI document."""

from typing import Any, Literal

import msgspec

from services.gateway.openapi import parameters, shapes
from services.gateway.openapi.operation import Operation, Parameter
from services.gateway.stored_chats.queries import MAX_PAGE

PATH = "/v1/chat/completions"
ONE = PATH + "/{generation}"
TAG = "Chat"


class ChangedChat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What can be changed of a stored chat completion."""

    metadata: dict[str, str] | None
    """In place of all that there are."""


class DeletedChat(msgspec.Struct, frozen=True):
    """What DELETE answers."""

    id: str
    object: Literal["chat.completion.deleted"]
    deleted: bool


class StoredMessage(msgspec.Struct):
    """A message of the conversation that a completion goes on with."""

    id: str
    role: str
    content: str | None
    content_parts: list[dict[str, Any]] | None


class StoredMessages(msgspec.Struct):
    """A page of messages."""

    object: Literal["list"]
    data: list[StoredMessage]
    first_id: str | None
    last_id: str | None
    has_more: bool


class StoredCompletions(msgspec.Struct):
    """A page of chat completions."""

    object: Literal["list"]
    data: list[shapes.ChatCompletion]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _query(name: str, description: str, schema: dict[str, Any]) -> Parameter:
    return Parameter(name, description, schema, "query")


_PAGES = (
    _query("after", "The id of the last entry that you have.", {"type": "string", "minLength": 1}),
    _query("limit", "Entries of a page.", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
    _query("order", "By time.", {"type": "string", "enum": ["asc", "desc"]}),
)
LIST = Operation(
    "GET",
    PATH,
    "listChatCompletions",
    "The chat completions that were made with `store: true`.",
    TAG,
    "`metadata[key]=value`, as often as you like, leaves those that have these metadata.",
    response=StoredCompletions,
    parameters=(*_PAGES, _query("model", "Of this model alone.", {"type": "string"})),
    errors=(404, 503),
)
RETRIEVE = Operation(
    "GET",
    ONE,
    "retrieveChatCompletion",
    "A chat completion that was made with `store: true`.",
    TAG,
    response=shapes.ChatCompletion,
    parameters=(parameters.GENERATION,),
    errors=(404, 429, 503, 504),
)
CHANGE = Operation(
    "POST",
    ONE,
    "updateChatCompletion",
    "Gives a stored chat completion other metadata.",
    TAG,
    request=ChangedChat,
    example={"metadata": {"topic": "geography"}},
    response=shapes.ChatCompletion,
    parameters=(parameters.GENERATION,),
    errors=(404, 408, 413, 429, 503, 504),
)
DELETE = Operation(
    "DELETE",
    ONE,
    "deleteChatCompletion",
    "Forgets a stored chat completion.",
    TAG,
    response=DeletedChat,
    parameters=(parameters.GENERATION,),
    errors=(404, 429, 503, 504),
)
MESSAGES = Operation(
    "GET",
    ONE + "/messages",
    "listChatCompletionMessages",
    "The messages that a stored chat completion answers.",
    TAG,
    response=StoredMessages,
    parameters=(parameters.GENERATION, *_PAGES),
    errors=(404, 429, 503, 504),
)
