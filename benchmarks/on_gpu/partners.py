"""Sections that measure one part alone: each part brings its own measurement, which is told here as rows."""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from benchmarks.on_gpu.bench import Bench, Row, row_of

HERE = "benchmarks.on_gpu"


def attention(bench: Bench) -> None:
    limits = {"bandwidth": bench.bandwidth, "matrix_rate": bench.matrix_rate("bf16")}
    _measure(bench, "attention", "attention_speed", **limits)


def graphs(bench: Bench) -> None:
    _measure(bench, "graphs", "graph_speed")


def collectives(bench: Bench) -> None:
    _measure(bench, "collectives", "collective_speed")


def products(bench: Bench) -> None:
    limits = {"bandwidth": bench.bandwidth, "matrix_rate": bench.matrix_rate("bf16")}
    _measure(bench, "products", "product_speed", brief=True, **limits)


def experts(bench: Bench) -> None:
    limits = {"bandwidth": bench.bandwidth, "matrix_rate": bench.matrix_rate("bf16")}
    _measure(bench, "experts", "expert_speed", **limits)


def adapters(bench: Bench) -> None:
    _measure(bench, "adapters", "adapter_speed", bandwidth=bench.bandwidth)


def sparse(bench: Bench) -> None:
    _measure(bench, "sparse", "sparse_speed", bandwidth=bench.bandwidth)


def loading(bench: Bench) -> None:
    """Of a checkpoint in page cache."""
    try:
        _measure(bench, "loading", "loading_speed")
    except OSError as error:
        bench.missing("loading/load", "loading a 13B", str(error))


def _measure(bench: Bench, section: str, name: str, **options: Any) -> None:
    """`name` is the module, and the function in it."""
    try:
        module = importlib.import_module(f"{HERE}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{HERE}.{name}":
            raise
        bench.missing(f"{section}/none", section, f"this version has no {name}")
        return
    _tell(bench, section, getattr(module, name)(device=bench.device, tiny=bench.tiny, **options))


def _tell(bench: Bench, section: str, found: Any) -> None:
    for row in rows_from(found, section):
        bench.report(row)
        if bench.left() <= 0:
            bench.missing(f"{section}/rest", "what comes after it", "no time was left")
            return


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
