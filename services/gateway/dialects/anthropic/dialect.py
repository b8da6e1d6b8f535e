"""Anthropic's messages and message batches, and its view of the models, for requests with its header."""

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.backend import RequestContext
from services.gateway.api.dialect import Dialect, ModelView
from services.gateway.api.models.shapes import Model
from services.gateway.core.pagination import NeighbourQuery, neighbours
from services.gateway.dialects.anthropic.endpoint import MessagesEndpoint
from services.gateway.dialects.anthropic.errors import MESSAGES, anthropic_headers, anthropic_models, described, rfc3339
from services.gateway.dialects.anthropic.messages import message_routes


class ModelInfo(msgspec.Struct, frozen=True):
    """Anthropic's model object."""

    type: str
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int | None
    max_tokens: int | None

    @classmethod
    def of(cls, model: Model) -> "ModelInfo":
        """The most tokens of an input and of an answer are those of the context, which they share."""
        length = model.max_model_len
        return cls("model", model.id, model.id, rfc3339(model.created), "active", length, length)


def model_page(ask: RequestContext, models: Sequence[Model]) -> dict[str, Any]:
    """The newest first, as Anthropic has them. Raises `RouteError`, `InvalidParameter`."""
    ordered = sorted(models, key=lambda model: (-model.created, model.id))
    found, more = neighbours(ordered, ask.query(NeighbourQuery))
    data = [ModelInfo.of(model) for model in found]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return {"data": data, "has_more": more, "first_id": first, "last_id": last}


ANTHROPIC = Dialect(
    "anthropic",
    message_routes,
    endpoints=(MessagesEndpoint(),),
    describe=described,
    error_event=b"error",
    done=False,
    paths=(MESSAGES,),
    claims=anthropic_models,
    answer_headers=anthropic_headers,
    models=ModelView(model_page, ModelInfo.of),
)
