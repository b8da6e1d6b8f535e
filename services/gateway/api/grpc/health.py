"""grpc.health.v1, which says the same as /ready; and server reflection v1 and v1alpha (by grpcio-reflection)."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import ReflectionServicer

from services.gateway.api.grpc.call import GrpcCall
from services.gateway.api.grpc.requests import decode
from services.gateway.api.grpc.server import RpcMethod
from services.gateway.core.errors import RouteError
from shared.service.endpoints import Health

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
LOOK = 0.2  # seconds between two looks for those who watch

_Response = health_pb2.HealthCheckResponse


class HealthService:
    """Standard health checking (grpc/doc/health-checking.md)."""

    def __init__(self, health: Callable[[], Health], services: Sequence[str]) -> None:
        """`services`: names that may be asked for, besides the empty one, which means the whole."""
        self._health = health
        self._known = frozenset(("", *services))
        # Done when the status is another one; there while somebody watches.
        self._change: asyncio.Future[None] | None = None
        self._watchers = 0
        self._looking: asyncio.Task[None] | None = None

    def methods(self) -> dict[str, RpcMethod]:
        return {
            f"/{SERVICE}/Check": RpcMethod(self.check, public=True),
            f"/{SERVICE}/Watch": RpcMethod(self.watch, public=True),
            f"/{SERVICE}/List": RpcMethod(self.list, public=True),
        }

    async def check(self, call: GrpcCall) -> None:
        asked = decode(health_pb2.HealthCheckRequest, call.take()).service
        if asked not in self._known:
            raise RouteError(
                f"Unknown service '{asked[:128]}'; use the empty name for the server itself.", reason="unknown_service"
            )
        await call.send(_Response(status=self._status()).SerializeToString())

    async def watch(self, call: GrpcCall) -> None:
        """Watch: the status now, and each change, until the client goes."""
        asked = decode(health_pb2.HealthCheckRequest, call.take()).service
        told = None
        self._watchers += 1
        try:
            while True:
                status = self._status() if asked in self._known else _Response.SERVICE_UNKNOWN
                if status != told:
                    await call.send(_Response(status=status).SerializeToString())
                    told = status
                else:
                    await call.wait(self._changed())
        finally:
            self._watchers -= 1

    def _changed(self) -> "asyncio.Future[None]":
        if self._change is None:
            loop = asyncio.get_running_loop()
            self._change = loop.create_future()
            self._looking = loop.create_task(self._look(self._change, self._status()))
        return self._change

    async def _look(self, change: "asyncio.Future[None]", seen: int) -> None:
        """One looks for all who watch, however many they are."""
        while self._watchers and self._status() == seen:  # noqa: ASYNC110 - nobody tells of a change
            await asyncio.sleep(LOOK)
        self._change = None
        change.set_result(None)

    async def list(self, call: GrpcCall) -> None:
        """List: every service's status."""
        decode(health_pb2.HealthListRequest, call.take())
        status = _Response(status=self._status())
        shown = health_pb2.HealthListResponse(statuses=dict.fromkeys(sorted(self._known), status))
        await call.send(shown.SerializeToString())

    def _status(self) -> "health_pb2.HealthCheckResponse.ServingStatus.ValueType":
        return _Response.SERVING if self._health().ready else _Response.NOT_SERVING


# The two have the same messages under two names.
SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


class ReflectionService:
    def __init__(self, services: Sequence[str]) -> None:
        """`services`: full names of what is served."""
        self._answer: Callable[[Any, Any], Any] = ReflectionServicer((*services, SERVICES[1])).ServerReflectionInfo

    def methods(self) -> dict[str, RpcMethod]:
        return {f"/{name}/ServerReflectionInfo": RpcMethod(self.info, streamed=True) for name in SERVICES}

    async def info(self, call: GrpcCall) -> None:
        """ServerReflectionInfo: an answer to each request."""
        while (data := await call.receive()) is not None:
            request = decode(reflection_pb2.ServerReflectionRequest, data)
            for response in self._answer([request], None):
                await call.send(response.SerializeToString())
