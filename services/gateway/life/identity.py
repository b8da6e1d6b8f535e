"""What a generation is called, so that any gateway finds its record. Pure.

    chatcmpl-  1f0c9a77  67e1c5b0  9b1d6e0f4c2a8835
    endpoint   writer    slot      random
               of the    second of
               records   its beginning

Writer and slot name the subject of the journal that holds the record: a look-up reads one second of one
gateway's records, whatever else the journal has. The random part cannot be guessed.
"""

import hashlib
import re
import secrets
from typing import NamedTuple

PREFIXES = {
    "chat.completions": "chatcmpl-",
    "completions": "cmpl-",
    "responses": "resp_",
    "embeddings": "embd-",
}
_ID = re.compile(r"(?:chatcmpl-|cmpl-|resp_|embd-)?([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{16}")


class Place(NamedTuple):
    """Where the record of a generation stands in the journal."""

    writer: str
    slot: str


def writer_of(consumer: str) -> str:
    """The short name under which a gateway writes its records. Two gateways may share it: their records
    then lie beside each other, and identities tell them apart."""
    return hashlib.blake2b(consumer.encode(), digest_size=4).hexdigest()


def new_identity(writer: str, now: float) -> str:
    """`now`: unix seconds."""
    return f"{writer}{int(now) & 0xFFFFFFFF:08x}{secrets.token_hex(8)}"


def parse(public_id: str) -> str | None:
    """The identity in an id as clients have it, with or without its prefix; None when it is none."""
    match = _ID.fullmatch(public_id)
    return public_id[-32:] if match else None


def of_choice(generation_id: str) -> str:
    """The identity of the answer that a generation, as the bus names it, is a choice of."""
    return generation_id.rpartition("-")[0]


def place(identity: str) -> Place:
    return Place(identity[:8], identity[8:16])
