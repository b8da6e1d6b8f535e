"""What lies on disk or is installed: formats of files with their marks, and what a wheel brings."""

import tomllib
from collections.abc import Iterator
from typing import Any

import msgspec

from services.executor.cpu import packed_file
from services.executor.kv_cache import spill_file, store_shape
from services.executor.kv_transfer import endpoint
from services.executor.model.model_facts import ModelFacts
from services.executor.training.trainer import adapter_files, state
from services.gateway.batches import lines, results
from shared.messages.debugging import DUMP_VERSION, Dump
from shared.messages.training import Hyperparameters
from tests.docs.pages import ROOT
from tests.interfaces.structs import fields, reached

_PROJECTS = ("pyproject.toml", "services/executor/engines/vllm/plugin/pyproject.toml", "clients/python/pyproject.toml")


def files() -> Iterator[str]:
    """A line for each mark of a format and each field of a header that another release may meet."""
    yield f"packed weights: {packed_file._MAGIC!r}, trailer {packed_file._TRAILER.format}"
    yield f"spilled blocks: {spill_file._MAGIC!r}, record {spill_file._CHECK.format} {spill_file._HEAD.format}"
    yield f"KV blocks, spilled and handed over: layout {store_shape.FORMAT_VERSION}"
    sent, answered = endpoint._FRAME.format, endpoint._ANSWER.format
    yield f"KV blocks, handed over: {endpoint.MAGIC!r}, frame {sent}, answer {answered}"
    yield f"fine-tuning: state {state._FORMAT}: {state._FACTOR}, {state._MOMENT}, {state._METRICS}"
    described = adapter_files._config([], Hyperparameters(), "")
    yield f"adapters: {adapter_files.CONFIG_FILE}, {adapter_files.WEIGHTS_FILE}"
    yield from (f"adapters: {adapter_files.CONFIG_FILE}: {key}" for key in described)
    yield f"adapters: the table of steps: {', '.join(adapter_files._COLUMNS)}"
    yield f"dumps: {DUMP_VERSION}"
    for kind in reached((packed_file._Header, ModelFacts)):
        yield from (f"packed weights: {line}" for line in fields(kind))
    for kind in reached((Dump,)):
        yield from (f"dumps: {line}" for line in fields(kind))
    yield from (f"batches, a line to read: {line}" for line in fields(lines._LineFields))
    written = msgspec.json.decode(results.succeeded("batch", 0, "id", b"{}").text)
    yield f"batches, a line of results: {', '.join(written)}; its response: {', '.join(written['response'])}"


def package() -> Iterator[str]:
    """Programs, extras, Pythons and entry points of each wheel."""
    for file in _PROJECTS:
        project: dict[str, Any] = tomllib.loads((ROOT / file).read_text())["project"]
        name = project["name"]
        yield f"{name}: Python {project['requires-python']}"
        yield from (f"{name}: program {program} = {entry}" for program, entry in project.get("scripts", {}).items())
        yield from (f"{name}: extra {extra}" for extra in project.get("optional-dependencies", ()))
        for group, entries in project.get("entry-points", {}).items():
            yield from (f"{name}: entry point {group}: {point} = {entry}" for point, entry in entries.items())
