"""The kinds of jobs that a gateway runs. A kind is a folder below (its record's states, admission, runners under a
lease, results) and a line here; without its line its routes are unknown and nobody runs its jobs.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.gateway.api.backend import GatewayBackend, RouteMaker
from services.gateway.api.openai.batches import batch_routes
from services.gateway.api.openai.fine_tuning import fine_tuning_routes
from services.gateway.batches.settings import BatchJobSettings
from services.gateway.batches.wiring import BatchRuntime
from services.gateway.dialects.anthropic.batches import message_batch_routes
from services.gateway.jobs.runtime import JobResources, JobRuntime
from services.gateway.training.settings import FineTuningSettings
from services.gateway.training.wiring import TrainingRuntime
from shared.config import CommonSettings

if TYPE_CHECKING:
    from services.gateway.api.grpc.call import GrpcCall

Calls = Mapping[str, "Callable[[GrpcCall], Awaitable[None]]"]  # methods of the gRPC API, by name


@dataclass(frozen=True)
class JobKind:
    make: Callable[[JobResources], JobRuntime]  # called once by each gateway, before it is connected
    # Its section of the gateway's settings: `make` takes it out of those (`section_of`).
    settings: type[CommonSettings]
    routes: tuple[RouteMaker, ...]
    calls: Callable[[GatewayBackend], Calls] = lambda backend: {}


def _batch_calls(backend: GatewayBackend) -> Calls:
    from services.gateway.api.grpc.batches import batch_calls  # its libraries take a moment, and memory

    return batch_calls(backend)


KINDS = (
    JobKind(BatchRuntime, BatchJobSettings, (batch_routes, message_batch_routes), _batch_calls),
    JobKind(TrainingRuntime, FineTuningSettings, (fine_tuning_routes,)),
)
