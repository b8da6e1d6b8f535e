"""What every runner of a batch works with."""

import msgspec

from services.gateway.auth.authenticator import Authenticator
from services.gateway.batches.endpoints import LineEndpoint
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.results import Results
from services.gateway.catalog import Catalog
from services.gateway.files.store import Files
from services.gateway.settings import GatewaySettings


class BatchParts(msgspec.Struct, frozen=True):
    """One set per gateway."""

    files: Files
    results: Results
    endpoints: dict[str, LineEndpoint]
    catalog: Catalog
    metrics: BatchMetrics
    settings: GatewaySettings
    authenticator: Authenticator
    instance: str
