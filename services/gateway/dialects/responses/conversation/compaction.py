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

from services.gateway.core.errors import InvalidField
from services.gateway.dialects.responses.stream.items import CompactionContent, Item, compaction_item
from services.gateway.intake.schemas import ChatCompletionRequest
from shared import limits

KIND = "compaction"
TRIGGER = "compaction_trigger"  # the last item of an input that is to be answered by its summary
PART_OF_CONTEXT = 8  # a summary has that part of the model's context at most
_PROMPT = (
    "Summarize the conversation above, so that you can go on with it from your summary alone. Keep names, numbers, "
    "decisions, what tools have said, and what is still to be done. Write the summary and nothing else."
)
_BEFORE = "Summary of the conversation so far:\n"


_decoder = msgspec.json.Decoder(CompactionContent)


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a conversation is summarized before it is answered."""

    type: str
    compact_threshold: int | None = None  # tokens of the prompt; null: half of the model's context


def item_of(summary: str, item_id: str = "") -> Item:
    """As it is listed and sent; by default with an id of its own."""
    return compaction_item(summary, item_id or f"cmp_{secrets.token_hex(16)}")


def summary_of(item: Item, path: str) -> str:
    """Raises `InvalidParameter` where it is none of this server's."""
    try:
        return _decoder.decode(base64.b64decode(item["encrypted_content"], validate=True)).summary
    except (binascii.Error, ValueError, msgspec.DecodeError):
        raise InvalidField(
            f"{path}.encrypted_content",
            "it was not made by this server's /v1/responses/compact; send the items that it stands for.",
        ) from None


def message_of(item: Item) -> dict[str, str]:
    """What the model reads of a summary, or of what asks for one."""
    return {"role": "user", "content": _PROMPT if item["type"] == TRIGGER else _BEFORE + summary_of(item, KIND)}


def behind_last(items: Sequence[Item]) -> list[Item]:
    """`items` from their last summary on, which stands for all before it."""
    found = [number for number, item in enumerate(items) if item["type"] == KIND]
    return list(items[found[-1] :] if found else items)


def split(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """(what may be summarized, what is being answered: the user's last message and what follows it)."""
    found = [number for number, item in enumerate(items) if item.get("role") == "user"]
    at = found[-1] if found else 0
    return list(items[:at]), list(items[at:])


def is_wanted(items: Sequence[Item]) -> bool:
    """Whether they end with a trigger. Raises `InvalidParameter` where there is nothing before it."""
    wanted = bool(items) and items[-1]["type"] == TRIGGER
    if wanted and len(items) == 1:
        raise InvalidField("input", f"there is nothing before the '{TRIGGER}' that could be summarized.")
    return wanted


def question() -> Item:
    """Behind the items that are to be summarized."""
    return {"type": TRIGGER, "role": "user"}


def summarizing(chat: ChatCompletionRequest, context_length: int, *, most: int | None = None) -> ChatCompletionRequest:
    """`chat`, whose last message is `question`, as it is asked of a model that reads so many tokens. `most`: tokens of
    the summary, where the client says that."""
    room = max(1, min(context_length // PART_OF_CONTEXT, limits.SUMMARY_TOKENS.value))
    return msgspec.structs.replace(
        chat,
        max_completion_tokens=min(room, most or room),
        response_format=None,
        tool_choice=None,
        tools=None,
        store=None,
        logprobs=None,
        top_logprobs=None,
        continue_final_message=None,
        request_id=None,
    )
