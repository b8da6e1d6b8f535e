"""HTTP and gRPC: operations with their parameters and answers, and every field that they have."""

import ast
import importlib
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from services.gateway.api.app import GatewayApp
from services.gateway.api.backend import GatewayBackend
from services.gateway.api.dialect import Dialect
from services.gateway.api.grpc.generated import inference_pb2
from services.gateway.api.openapi.document import document
from services.gateway.auth.authenticator import Authenticator
from services.gateway.core.errors import status_of
from services.gateway.core.metrics import GatewayMetrics
from services.gateway.core.settings import GatewaySettings
from services.gateway.dialects.registry import DIALECTS
from services.gateway.job_kinds import KINDS
from shared.errors import RyzansteinError
from shared.service.endpoints import Health, OpsApp, new_registry
from tests.interfaces.sources import module_of, nodes

_OUR_HEADER = re.compile(r"x-ryzanstein-[a-z-]+")
_MADE_FOR_PEOPLE = ("description", "title", "example", "examples", "summary")


def gateway_app() -> GatewayApp:
    """With all its routes and the default settings, and nothing behind them."""
    registry = new_registry()
    ops = OpsApp(lambda: Health("gateway", "g", "ready", True), registry)
    jobs = Dialect("job kinds", [make for kind in KINDS for make in kind.routes])
    backend = GatewayBackend(Authenticator(), GatewaySettings(), GatewayMetrics(registry))
    return GatewayApp(backend, ops, (*DIALECTS, jobs))


def openapi(app: GatewayApp) -> dict[str, Any]:
    """The document at /openapi.json."""
    made: dict[str, Any] = json.loads(msgspec.json.encode(document(app.routes, GatewaySettings())))
    return made


def http() -> Iterator[str]:
    """A line for each code of errors, each header of ours, each operation, parameter, answer and field of a body."""
    yield from _error_codes()
    yield from _headers()
    made = openapi(gateway_app())
    for path, item in made["paths"].items():
        for method, operation in item.items():
            yield from _operation(f"{method.upper()} {path}", operation)
    for name, schema in made["components"]["schemas"].items():
        yield from _component(name, schema)


def _error_codes() -> Iterator[str]:
    """Each code that an error may have, with its status."""
    for path, node in nodes("code = ", "services/gateway", "shared"):
        if isinstance(node, ast.ClassDef):
            kind = getattr(importlib.import_module(module_of(path)), node.name, None)
            if isinstance(kind, type) and issubclass(kind, RyzansteinError) and "code" in vars(kind):
                yield f"error {kind.code}: {status_of(kind.__new__(kind))}"


def _headers() -> Iterator[str]:
    """Each header of our own."""
    for _, node in nodes("x-ryzanstein-", "services/gateway"):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            name = node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
            if _OUR_HEADER.fullmatch(name.lower()):
                yield f"header {name.lower()}"


def _operation(name: str, operation: dict[str, Any]) -> Iterator[str]:
    yield name
    for parameter in operation["parameters"]:
        required = ", required" if parameter.get("required") else ""
        yield f"{name}: {parameter['in']} {parameter['name']}: {_form(parameter['schema'])}{required}"
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        yield f"{name}: takes {kind}: {_form(body['schema'])}"
    answers: dict[str, list[str]] = {}
    for status, answer in operation["responses"].items():
        for kind, body in answer.get("content", {"nothing": {"schema": {}}}).items():
            answers.setdefault(f"{kind}: {_form(body['schema'])}", []).append(status)
    yield from (f"{name}: answers {', '.join(statuses)} {body}" for body, statuses in answers.items())


def _component(name: str, schema: dict[str, Any]) -> Iterator[str]:
    fields = schema.pop("properties", {})
    required = schema.pop("required", [])
    yield f"{name}: {_form(schema)}"
    for field, form in fields.items():
        yield f"{name}.{field}: {_form(form)}{', required' if field in required else ''}"


def _form(schema: Any) -> str:
    """A schema without what it says to people, on one line."""
    return json.dumps(_bare(schema), ensure_ascii=False).replace("#/components/schemas/", "")


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Under `properties` these are names of fields.
    return {
        key: {name: _bare(form) for name, form in value.items()} if key == "properties" else _bare(value)
        for key, value in schema.items()
        if key not in _MADE_FOR_PEOPLE
    }


def grpc() -> Iterator[str]:
    """A line for each method of a service, field of a message and value of an enumeration, with their numbers."""
    file: FileDescriptor = inference_pb2.DESCRIPTOR
    for service in file.services_by_name.values():
        for method in service.methods:
            takes, gives = (
                f"{'stream ' if streaming else ''}{message.full_name}"
                for streaming, message in (
                    (method.client_streaming, method.input_type),
                    (method.server_streaming, method.output_type),
                )
            )
            yield f"{service.full_name}/{method.name}({takes}) returns ({gives})"
    for enumeration in file.enum_types_by_name.values():
        yield from (f"{enumeration.full_name} {value.number}: {value.name}" for value in enumeration.values)
    for message in file.message_types_by_name.values():
        yield from _message(message)


def _message(message: Descriptor) -> Iterator[str]:
    yield from (f"{message.full_name} {field.number}: {field.name}: {_type(field)}" for field in message.fields)
    for enumeration in message.enum_types:
        yield from (f"{enumeration.full_name} {value.number}: {value.name}" for value in enumeration.values)
    for nested in message.nested_types:
        yield from _message(nested)


def _type(field: FieldDescriptor) -> str:
    named = field.message_type or field.enum_type
    kinds = {
        value: name.removeprefix("TYPE_").lower()
        for name, value in vars(FieldDescriptor).items()
        if name.startswith("TYPE_")
    }
    name = named.full_name if named else kinds[field.type]
    return f"{'repeated ' if field.is_repeated else 'optional ' if field.has_presence else ''}{name}"
