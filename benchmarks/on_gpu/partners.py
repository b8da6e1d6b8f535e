"""Sections that measure one part alone: each part brings its own measurement, which is told here as rows."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from benchmarks.on_gpu.bench import Bench
from benchmarks.on_gpu.rows import Row, row_of

HERE = "benchmarks.on_gpu"


def attention(bench: Bench) -> None:
    _tell(bench, "attention", _find("attention_speed", "attention_speed")(bench.device, bench.tiny))


def graphs(bench: Bench) -> None:
    _tell(bench, "graphs", _find("graph_speed", "graph_speed")(bench.device, bench.tiny))


def collectives(bench: Bench) -> None:
    _tell(bench, "collectives", _find("collective_speed", "collective_speed")(bench.device, bench.tiny))


def loading(bench: Bench) -> None:
    _tell(bench, "loading", _find("loading_speed", "loading_speed")(bench.device, bench.tiny))


def _find(module: str, function: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(f"{HERE}.{module}"), function)
    return found


def _tell(bench: Bench, section: str, found: Any) -> None:
    for row in rows_from(found, section):
        bench.report(row)


def rows_from(found: Any, section: str) -> Iterable[Row]:
    """What a part says, as rows: rows themselves, or fields by name, or a name for each figure."""
    if isinstance(found, Mapping) and not {"what", "figure"} & found.keys():
        found = [{"what": str(name), "figure": value} for name, value in found.items()]
    elif isinstance(found, Mapping | Row):
        found = [found]
    for number, one in enumerate(found):
        content = one if isinstance(one, Mapping) else _fields(one)
        row = row_of(dict(content))
        key = row.key or f"{section}/{row.what or number}"
        yield Row(**{**asdict(row), "key": key if key.startswith(section) else f"{section}/{key}"})


def _fields(one: Any) -> dict[str, Any]:
    if is_dataclass(one) and not isinstance(one, type):
        return asdict(one)
    if hasattr(one, "_asdict"):
        return dict(one._asdict())
    return {name: getattr(one, name) for name in getattr(one, "__struct_fields__", ())}
