"""Streams that survive their connection, generations that others attach to, rankings, and batches over NATS.

For everything else use OpenAI's client. `BatchQueue` needs the extra `batch`.
"""

from ryzanstein_client.asynchronous import AsyncClient, AsyncStream
from ryzanstein_client.client import Client, Stream
from ryzanstein_client.cursor import Cursor
from ryzanstein_client.errors import ApiError
from ryzanstein_client.types import GenerationState, Piece, Prefilled, RankedDocument, Ranking

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Cursor",
    "GenerationState",
    "Piece",
    "Prefilled",
    "RankedDocument",
    "Ranking",
    "Stream",
]
