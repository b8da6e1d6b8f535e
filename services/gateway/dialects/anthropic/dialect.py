"""Anthropic's messages and message batches, and its view of the models, for requests with its header."""

from services.gateway.api.dialect import Dialect, ModelView
from services.gateway.dialects.anthropic.endpoint import MessagesEndpoint
from services.gateway.dialects.anthropic.errors import MESSAGES, anthropic_headers, anthropic_models, described
from services.gateway.dialects.anthropic.messages import message_routes
from services.gateway.dialects.anthropic.models import ModelInfo, model_page

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
