"""Server reflection, v1 and v1alpha: grpcurl and its like ask what there is; the grpcio-reflection package answers."""

from collections.abc import Callable, Sequence
from typing import Any

from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import ReflectionServicer

from services.gateway.grpc.call import Call
from services.gateway.grpc.requests import decode
from services.gateway.grpc.server import Method

SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The two have the same messages under two names."""


class ReflectionService:
    def __init__(self, services: Sequence[str]) -> None:
        """`services`: full names of what is served."""
        self._answer: Callable[[Any, Any], Any] = ReflectionServicer(
            (*services, SERVICES[1])
        ).ServerReflectionInfo

    def methods(self) -> dict[str, Method]:
        """By path."""
        return {f"/{name}/ServerReflectionInfo": Method(self.info, streamed=True) for name in SERVICES}

    async def info(self, call: Call) -> None:
        """ServerReflectionInfo: an answer to each request."""
        while (data := await call.receive()) is not None:
            request = decode(reflection_pb2.ServerReflectionRequest, data)
            for response in self._answer([request], None):
                await call.send(response.SerializeToString())
