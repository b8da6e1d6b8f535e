"""Which conversation a request belongs to, for sticky routing, and with whom it shares KV cache. Pure.

A plain prompt has none: schedulers place it by its beginning (`scheduler/queue/request.py`).
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


def session_of(tenant: str, name: str) -> str:
    """The session that a tenant calls `name`, and nobody else's, whatever they call theirs; "" without a name."""
    return f"{_digest(tenant)}-{name}" if name else ""


def cache_key(given: str | None) -> str:
    """The session that `prompt_cache_key` names: its hash, however long it is; "" when there is none."""
    if not given:
        return ""
    return f"key-{_digest(given)}"


def cache_salt(given: str | None, tenant: str) -> str:
    """What begins the names of a prompt's cached blocks: the hash of what the client gives, and of the tenant where
    tenants share none; "" where there is neither."""
    if not given and not tenant:
        return ""
    text = f"{len(tenant)}:{tenant}:{given or ''}"
    return f"salt-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
