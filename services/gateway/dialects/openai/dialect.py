"""OpenAI's chats and completions, which are what other APIs' requests are translated into."""

from services.gateway.api.dialect import Dialect
from services.gateway.dialects.openai.endpoints import ChatEndpoint, CompletionEndpoint
from services.gateway.dialects.openai.routes import chat_routes

OPENAI = Dialect(
    "openai",
    chat_routes,
    endpoints=(ChatEndpoint(), CompletionEndpoint()),
    absent={"/v1/moderations": "no model here judges texts; ask a classifier (/v1/classify), or a language model"},
)
