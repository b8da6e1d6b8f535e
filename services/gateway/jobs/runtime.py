"""What a kind of jobs gets from its gateway, and what it is there (`services/gateway/job_kinds.py`)."""

from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec
from prometheus_client import CollectorRegistry

from services.gateway.auth.authenticator import Authenticator
from services.gateway.core.adapters import AdapterRegistry
from services.gateway.core.catalog import Catalog
from services.gateway.core.cold_starts import ColdStarts
from services.gateway.core.settings import GatewaySettings
from services.gateway.files.files import Files
from services.gateway.intake.intake import Intake
from services.gateway.tokenizer.store import TokenizerStore
from shared.nats.bus import Bus


class JobResources(msgspec.Struct, frozen=True):
    """What a gateway has for every kind."""

    bus: Bus
    instance: str
    settings: GatewaySettings
    registry: CollectorRegistry
    authenticator: Authenticator
    files: Files
    catalog: Catalog
    cold_starts: ColdStarts
    tokenizers: TokenizerStore
    adapters: AdapterRegistry
    intake: Intake


class JobRuntime(Protocol):
    """One kind in one gateway: made without I/O, opened by `start`."""

    @property
    def service(self) -> object:
        """What is behind its routes."""
        ...

    async def start(self) -> list[tuple[Coroutine[Any, Any, None], str]]:
        """What is to run from now on, and its name in logs. Raises `BrokerUnavailable`."""
        ...

    async def stop(self) -> None:
        """Leaves its jobs to other gateways."""
        ...
