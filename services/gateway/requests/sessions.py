"""Which conversation a request belongs to, for sticky routing. Pure.

A plain prompt has none: schedulers place it by its beginning (`scheduler/prefixes.py`).
"""

import hashlib
from collections.abc import Mapping, Sequence


def conversation_key(messages: Sequence[Mapping[str, str]]) -> str:
    """The session of a conversation that names none: the hash of its beginning.

    The first system message and the first user message stay the same from turn to turn.
    """
    digest = hashlib.blake2b(digest_size=16)
    for role in ("system", "user"):
        first = next((message["content"] for message in messages if message["role"] == role), "")
        digest.update(f"{len(first)}:{first}".encode())
    return f"auto-{digest.hexdigest()}"


def cache_key(given: str | None) -> str:
    """The session that `prompt_cache_key` names: its hash, however long it is; "" when there is none."""
    if not given:
        return ""
    return f"key-{hashlib.blake2b(given.encode(), digest_size=16).hexdigest()}"
