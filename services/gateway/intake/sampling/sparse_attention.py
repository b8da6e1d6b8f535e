"""Which earlier tokens the tokens of a request read, as far as its model can."""

import msgspec

from services.gateway.core.catalog import Resolved
from services.gateway.core.errors import InvalidParameter
from services.gateway.core.field_errors import unsupported
from services.gateway.intake.schemas import SparseAttentionField, SparseAttentionOptions
from shared.messages import ModelCard, SparseAttention
from shared.sparse_attention import FIELDS, WrongChoice, check


def sparse_of(given: SparseAttentionField | None, model: Resolved, card: ModelCard) -> SparseAttention | None:
    """Which earlier tokens the request's tokens read; None: all. Raises `InvalidParameter`."""
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
