"""A long conversation in a few words: the model itself summarizes it, in the place of what it summarizes. Pure.

    items 0 .. n          a summary of them
    user's last message ──▶ user's last message
    ...                     ...

The summary is a `compaction` item, whose `encrypted_content` is base64: it is opaque, and no secret, for whoever has it
has the conversation too. Items before the last one are not read any more.
"""

import base64
import binascii
import secrets
from collections.abc import Sequence

import msgspec

from services.gateway.core.errors import InvalidParameter
from services.gateway.intake.schemas import ChatCompletionRequest
from services.gateway.streams.response_items import Item
from shared import limits

KIND = "compaction"
PART_OF_CONTEXT = 8
"""A summary has that part of the model's context at most."""
_PROMPT = (
    "Summarize the conversation above, so that you can go on with it from your summary alone. Keep names, numbers, "
    "decisions, what tools have said, and what is still to be done. Write the summary and nothing else."
)
_BEFORE = "Summary of the conversation so far:\n"


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    summary: str
    version: int = 1


_decoder = msgspec.json.Decoder(_Content)


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a conversation is summarized before it is answered."""

    type: str
    compact_threshold: int | None = None
    """Tokens of the prompt; null: half of the model's context."""


def item_of(summary: str, item_id: str = "") -> Item:
    """As it is listed and sent."""
    content = base64.b64encode(msgspec.json.encode(_Content(summary))).decode()
    return {"id": item_id or f"cmp_{secrets.token_hex(16)}", "type": KIND, "encrypted_content": content}


def summary_of(item: Item, path: str) -> str:
    """Raises `InvalidParameter` where it is none of this server's."""
    try:
        return _decoder.decode(base64.b64decode(item["encrypted_content"], validate=True)).summary
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise InvalidParameter(
            f"Invalid '{path}.encrypted_content': it was not made by this server's /v1/responses/compact; send the "
            "items that it stands for.",
            param=f"{path}.encrypted_content",
            reason="invalid_value",
        ) from None


def message_of(item: Item) -> dict[str, str]:
    """What the model reads of it."""
    return {"role": "user", "content": _BEFORE + summary_of(item, KIND)}


def behind_last(items: Sequence[Item]) -> list[Item]:
    """`items` from their last summary on, which stands for all before it."""
    found = [number for number, item in enumerate(items) if item["type"] == KIND]
    return list(items[found[-1] :] if found else items)


def split(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """(what may be summarized, what is being answered: the user's last message and what follows it)."""
    found = [number for number, item in enumerate(items) if item.get("role") == "user"]
    at = found[-1] if found else 0
    return list(items[:at]), list(items[at:])


def question() -> Item:
    """Behind the items that are to be summarized."""
    return {"type": "message", "role": "user", "content": _PROMPT}


def summarizing(chat: ChatCompletionRequest, context_length: int) -> ChatCompletionRequest:
    """`chat`, whose last message is `question`, as it is asked of a model that reads so many tokens."""
    return msgspec.structs.replace(
        chat,
        max_completion_tokens=max(1, min(context_length // PART_OF_CONTEXT, limits.SUMMARY_TOKENS.value)),
        response_format=None,
        tool_choice=None,
        tools=None,
        stream=False,
        stream_options=None,
        store=None,
        logprobs=None,
        top_logprobs=None,
        continue_final_message=None,
        request_id=None,
    )
