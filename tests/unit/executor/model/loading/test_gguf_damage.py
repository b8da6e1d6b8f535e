"""Files of every architecture that are damaged in what only its row knows: served, or refused in a sentence.

What lies in the file where (its header, cut files, changed bytes) is `test_gguf_file.py`'s.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch

from services.executor.families.gguf_architectures import GGUF
from services.executor.model.card import encoder_config
from shared.errors import RyzansteinError
from tests.unit.executor.model.gguf_models import ALL, finish
from tests.unit.executor.model.lanes import in_lanes
from tests.unit.executor.model.loading import test_gguf_delta_rules as delta_rules
from tests.unit.executor.model.loading import test_gguf_dense as dense
from tests.unit.executor.model.loading import test_gguf_encoders as encoders
from tests.unit.executor.model.loading import test_gguf_families as families
from tests.unit.executor.model.loading import test_gguf_layers as layers
from tests.unit.executor.model.loading import test_gguf_mixtures as mixtures
from tests.unit.executor.model.loading import test_gguf_state_spaces as state_spaces
from tests.unit.executor.model.loading import test_gguf_weights as weights
from tests.unit.executor.model.loading.gguf_checks import converted, load, values_of

TABLES: tuple[Any, ...] = (layers, mixtures, dense, encoders, state_spaces)  # modules that have one of models
OTHERS = ((delta_rules, delta_rules.WRITE), (families, families.CASES))
MAKERS: dict[str, Callable[[Path], Path]] = {
    **{name: lambda at, name=name: weights.make(at, name, "Q8_0") for name in ALL},  # type: ignore[misc]
    **{
        name: lambda at, name=name, module=module: module.make(at, name, "F32")[1]  # type: ignore[misc]
        for module, names in (*OTHERS, *((one, one.MODELS) for one in TABLES))
        for name in names
    },
}
TIMES = 24  # damages of each architecture
SEVERAL = 4  # of each fifth in `make test-slow`


class Whole(NamedTuple):
    architecture: str
    keys: dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]]
    tensors: dict[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]]


def read(file: Path) -> Whole:
    reader = gguf.GGUFReader(str(file))
    keys = {}
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kinds = [*field.types, None]
            keys[name] = (field.contents(), kinds[0], kinds[1])
    tensors = {one.name: (np.array(one.data), one.tensor_type) for one in reader.tensors}
    return Whole(str(reader.fields["general.architecture"].contents()), keys, tensors)


def write(whole: Whole, file: Path) -> None:
    writer = gguf.GGUFWriter(str(file), whole.architecture)
    for name, (value, kind, inner) in whole.keys.items():
        writer.add_key_value(name, value, kind, inner)
    for name, (data, stored) in whole.tensors.items():
        writer.add_tensor(name, data, raw_dtype=stored)
    finish(writer)


def damaged(whole: Whole, draw: random.Random) -> tuple[str, Whole]:
    """(what was done, the file's content)"""
    if draw.random() < 0.6:
        name = draw.choice([name for name in whole.keys if name.startswith(f"{whole.architecture}.")])
        how, value = draw.choice([*other_values(whole.keys[name][0])])
        keys = {key: held for key, held in whole.keys.items() if key != name}
        if value is not None:
            keys[name] = (value, *kinds_of(value))
        return f"{name} {how}", whole._replace(keys=keys)
    name = draw.choice([*whole.tensors])
    data, stored = whole.tensors[name]
    how, other = draw.choice([*other_tensors(data)])
    tensors = {key: held for key, held in whole.tensors.items() if key != name}
    if other is not None:
        tensors[name] = (other, stored)
    return f"{name} {how}", whole._replace(tensors=tensors)


def other_values(value: Any) -> Iterator[tuple[str, Any]]:
    yield "left out", None
    yield "of another type", 1 if isinstance(value, str | list) else "many"
    if isinstance(value, list):
        yield "shorter", value[:-1]
        yield "of zeros", [0 for _ in value]
    elif not isinstance(value, str):
        for other in (0, 1, 3, 1 << 31, -1.0, float("nan"), 1e9):
            yield f"is {other}", other


def kinds_of(value: Any) -> tuple[gguf.GGUFValueType, gguf.GGUFValueType | None]:
    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        return kinds.ARRAY, kinds_of(value[0])[0] if value else kinds.INT32
    return (kinds.get_type(value) if not isinstance(value, int) or value < 1 << 31 else kinds.UINT32), None


def other_tensors(data: np.ndarray[Any, Any]) -> Iterator[tuple[str, Any]]:
    yield "left out", None
    yield "without its last row", data[:-1]
    yield "twice as high", np.concatenate([data, data])
    yield "of three dimensions", data[None, None] if data.ndim == 1 else data[None]


def served_or_refused(file: Path) -> str:
    """Why it is refused; empty where it is served."""
    try:
        made = converted(file)
        if encoder_config(made) is not None:
            encoders.theirs(made)
        else:
            values_of(load(made, torch.float32, keep_codes=True))
    except RyzansteinError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "times"),
    in_lanes(
        [(name, times) for name in MAKERS for times in (SEVERAL, TIMES)],
        [],
        [(name, SEVERAL) for name in [*MAKERS][::5]],
    ),
)
def test_damaged_files_are_served_or_refused_in_a_sentence(tmp_path: Path, name: str, times: int) -> None:
    (tmp_path / "whole").mkdir()
    whole = read(MAKERS[name](tmp_path / "whole"))
    draw = random.Random(f"{name} {times}")
    for number in range(times):
        directory = tmp_path / str(number)
        directory.mkdir()
        what, content = damaged(whole, draw)
        write(content, directory / "model.gguf")
        refusal = served_or_refused(directory / "model.gguf")
        assert "\n" not in refusal, what
        if "left out" in what and what.split()[0] in whole.tensors and not skipped(what):
            assert refusal, f"{what}, and nobody noticed"


def skipped(what: str) -> bool:
    """Tensors that a file may lack: a head of its own, biases, what follows from settings."""
    return any(part in what for part in ("output.weight", "rope_f", ".bias", "nextn"))


def test_every_architecture_is_damaged() -> None:
    names = {*ALL.values(), *(case.architecture for case in families.CASES.values())}
    names |= {name for module in TABLES for _, name, *_ in module.MODELS.values()}
    assert {name for name, row in GGUF.items() if row.config_type() not in delta_rules.WRITE} <= names
