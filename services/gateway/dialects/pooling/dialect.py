"""Embeddings as OpenAI has them, ranks as Jina and Cohere, scores, classes and pooling as vLLM."""

from services.gateway.api.dialect import Dialect
from services.gateway.dialects.pooling.endpoints import ENDPOINTS
from services.gateway.dialects.pooling.routes import pooling_routes

POOLING = Dialect("pooling", pooling_routes, endpoints=ENDPOINTS)
