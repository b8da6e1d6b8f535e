"""Ollama's API: lines of JSON in place of events, models by the names that they have there."""

from services.gateway.api.dialect import Dialect
from services.gateway.core.asgi import LineStream
from services.gateway.dialects.ollama.formats import OllamaChatFormat, OllamaGenerateFormat
from services.gateway.dialects.ollama.generating import generating_routes
from services.gateway.dialects.ollama.models import ollama_model_routes
from services.gateway.dialects.ollama.shapes import described
from services.gateway.intake.endpoint import Endpoint


class OllamaChatEndpoint(Endpoint):
    """Of what is begun by /api/chat."""

    name = "ollama.chat"
    presentation = OllamaChatFormat
    nameless = True


class GenerateEndpoint(Endpoint):
    """Of what is begun by /api/generate."""

    name = "ollama.generate"
    presentation = OllamaGenerateFormat
    nameless = True


OLLAMA = Dialect(
    "ollama",
    (generating_routes, ollama_model_routes),
    endpoints=(OllamaChatEndpoint(), GenerateEndpoint()),
    describe=described,
    stream=LineStream,
    done=False,
    paths=("/api/",),
)
