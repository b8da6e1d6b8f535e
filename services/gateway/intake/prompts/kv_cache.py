"""Under which names a prompt's KV blocks are found again, for how long they are kept, and which of them are read.

The session is for sticky routing; a plain prompt has none: schedulers place it by its beginning
(`scheduler/request.py`).
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from services.gateway.core.catalog import Resolved
from services.gateway.core.errors import InvalidParameter, unsupported
from services.gateway.intake.schemas import (
    ChatCompletionRequest,
    GenerationFields,
    Message,
    SparseAttentionField,
    SparseAttentionOptions,
)
from shared.engine_features import refusal
from shared.messages import ModelCard, SparseAttention
from shared.sparse_attention import FIELDS, WrongChoice, check


def conversation_key(messages: Sequence[Message]) -> str:
    """The session of a conversation that names none: the hash of its beginning.

    The first system message and the first user message stay the same from turn to turn. `developer` is OpenAI's new
    name of `system`.
    """
    system = user = None
    for message in messages:
        if system is None and message.role in ("system", "developer"):
            system = message.text
        elif user is None and message.role == "user":
            user = message.text
    system, user = system or "", user or ""
    return f"auto-{_digest(f'{len(system)}:{system}{len(user)}:{user}')}"


def session_named(request: GenerationFields) -> str:
    """By its `prompt_cache_key`, else by the beginning of its conversation; "" for a plain prompt."""
    key = cache_key(request.prompt_cache_key)
    return conversation_key(request.messages) if not key and isinstance(request, ChatCompletionRequest) else key


def session_of(tenant: str, name: str, adapter: str = "") -> str:
    """The session that a tenant calls `name`, and nobody else's, whatever they call theirs; "" without a name. With
    each LoRA adapter (its digest) it is another one: what is kept of it is of no use to others."""
    if not name:
        return ""
    return f"{_of_tenant(tenant)}-{adapter[:16]}-{name}" if adapter else f"{_of_tenant(tenant)}-{name}"


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


_of_tenant = lru_cache(1024)(_digest)  # of a tenant: the same with all its requests


CACHE_SECONDS = {"in_memory": 0.0, "in-memory": 0.0, "30m": 1800.0, "12h": 43200.0, "24h": 86400.0}


def cache_ttl(request: GenerationFields) -> float:
    """Seconds for which `request` wants its session's blocks kept; the longest that it names. 0: it names none;
    negative: it wants them not to be."""
    if not isinstance(request, ChatCompletionRequest):
        return 0.0
    options = request.prompt_cache_options
    given: list[str | None] = [request.prompt_cache_retention]
    if options is not None:
        given.append(options.ttl)
    named = len(given)
    for message in request.messages:
        if isinstance(message.content, list):
            given += [
                part.prompt_cache_breakpoint.ttl for part in message.content if part.prompt_cache_breakpoint is not None
            ]
    if options is not None and options.mode == "explicit" and len(given) == named:
        return -1.0
    return max(map(CACHE_SECONDS.__getitem__, filter(None, given)), default=0.0)


# --- which of them are read -----------------------------------------------------------------------


def sparse_of(given: SparseAttentionField | None, model: Resolved, card: ModelCard) -> SparseAttention | None:
    """Which earlier tokens the request's tokens read; None: all. Raises `InvalidRequest`."""
    if given is None:
        return model.sparse if model.sparse_unasked else None
    if given is False:
        return None
    choice = model.sparse or SparseAttention()
    if isinstance(given, SparseAttentionOptions):
        fields = {name: value for name in FIELDS if (value := getattr(given, name)) is not None}
        choice = msgspec.structs.replace(choice, **fields)
    try:
        check(choice, card.page_tokens)
    except WrongChoice as error:
        name = f"sparse_attention.{error.field}"
        raise InvalidParameter(f"Invalid '{name}': {error}.", param=name) from None
    if choice.kind in card.sparse:
        return choice
    if (refused := refusal(["sparse"], card.engine)) is not None:
        raise refused
    if "window" in card.sparse:
        why = (
            f"the groups of {card.model} keep no summaries of pages; leave it out, ask for kind 'window', or have the "
            f"model loaded with them (ryzanstein models set {card.model} --sparse-attention on)"
        )
    else:
        why = (
            f"{card.model} cannot: none of its layers attends to all earlier tokens, or its groups are of an earlier "
            "version; leave it out"
        )
    raise unsupported("sparse_attention", why)
