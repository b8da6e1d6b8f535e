"""OpenAI's responses, over HTTP and on a WebSocket, and the conversations that they are turns of."""

from services.gateway.api.dialect import Dialect
from services.gateway.api.websocket import socket_routes
from services.gateway.dialects.responses.conversations import conversation_routes
from services.gateway.dialects.responses.endpoint import ResponsesEndpoint
from services.gateway.dialects.responses.routes import PATH, response_routes
from services.gateway.dialects.responses.socket import ResponseConnection

RESPONSES = Dialect(
    "responses",
    (*response_routes, conversation_routes, socket_routes(PATH, ResponseConnection)),
    endpoints=(ResponsesEndpoint(),),
    error_event=b"error",
)
