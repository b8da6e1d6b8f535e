"""`ryzanstein`: its commands with their arguments and options, and what `--json` prints."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from services.cli.commands.doctor.check import DoctorReport
from services.cli.commands.fine_tune.command import Checkpoint, Event, Job
from services.cli.commands.keys import KeyStatus
from services.cli.commands.models.disk import DiskUse
from services.cli.commands.status import StackStatus
from services.cli.groups import app
from services.cli.recommended_models import Recommendation
from services.cli.sla.report import Report as SlaReport
from shared.messages import AdapterRecord, ModelPlacement, ModelSpec
from shared.messages.debugging import Dump
from shared.model_status import ModelStatus
from shared.model_store.catalog import LocalModel
from shared.model_store.programs import ServableVerdict
from tests.docs.pages import ROOT
from tests.interfaces.sources import module_of
from tests.interfaces.structs import fields, reached

# What commands print with --json; objects that they make in place are read from the source (`_objects`).
_PRINTED: tuple[Any, ...] = (
    *(AdapterRecord, Checkpoint, Dump, DiskUse, DoctorReport, Event, Job, KeyStatus, LocalModel, ModelPlacement),
    *(ModelSpec, ModelStatus, Recommendation, ServableVerdict, SlaReport, StackStatus),
)
_PRINTERS = ("dumps", "encode", "print_json")  # of calls whose dictionaries are printed
_SHAPERS = ("model_json", "_fields", "_told")  # functions whose dictionaries are


def command_line() -> Iterator[str]:
    """A line for each command, argument and option, and for each field of what `--json` prints. What `launch` writes
    has the form that other programs ask for, and is not listed."""
    yield from _commands(typer.main.get_command(app), "ryzanstein")
    for path in sorted(path for path in (ROOT / "services/cli/commands").rglob("*.py") if "launch" not in path.parts):
        yield from _objects(path)
    for kind in reached(_PRINTED):
        yield from (f"--json {line}" for line in fields(kind))


def _commands(command: Any, name: str) -> Iterator[str]:
    if not hasattr(command, "commands"):
        yield name
        for parameter in command.params:
            yield f"{name} {_parameter(parameter)}"
        return
    for word in command.commands:
        yield from _commands(command.commands[word], f"{name} {word}")


def _parameter(parameter: Any) -> str:
    names = "|".join((*parameter.opts, *parameter.secondary_opts))
    argument = f"[{names}]" if parameter.param_type_name == "argument" else names
    kind = getattr(parameter.type_descriptor.annotation, "__name__", str(parameter.type_descriptor.annotation))
    many = "..." if parameter.multiple or parameter.nargs != 1 else ""
    if parameter.required:
        return f"{argument}: {kind}{many}, required"
    default = parameter.default
    shown = "made when asked for" if callable(default) else repr(default).replace(str(Path.home()), "~")
    return f"{argument}: {kind}{many} = {shown}"


def _objects(path: Path) -> Iterator[str]:
    """The keys of each dictionary that a module's commands print."""
    module = module_of(path).removeprefix("services.cli.commands.")
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
        prints = any(getattr(call.func, "attr", getattr(call.func, "id", "")) in _PRINTERS for call in calls)
        if not prints and function.name not in _SHAPERS:
            continue
        for node in ast.walk(function):
            keys = (
                [key.value for key in node.keys if isinstance(key, ast.Constant)] if isinstance(node, ast.Dict) else []
            )
            if keys:
                yield f"--json of {module}.{function.name}: {', '.join(map(str, keys))}"
