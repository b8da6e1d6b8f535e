"""Imports transformers without what serving never calls: half of the time of `import transformers` and its models.

Left out are its own sharding of models over processes, its own batching, and PyTorch's compiler, which it imports for
decorators alone. Whoever imports the compiler afterwards gets it; decorators have left functions as they are.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_BATCHING = "transformers.generation.continuous_batching"
_SHARDING = "is_torch_distributed_available"  # asked by its modules while they are imported
_ASKED_AT = ("transformers.utils.import_utils", "transformers.utils")
# What the models import, and with it all that is left out.
MODULES = ("transformers.modeling_utils", "transformers.generation.utils", "transformers.models.auto.modeling_auto")


def import_transformers() -> None:
    """The first import of transformers in this process; without effect where it is not the first. Where a version
    needs at once what is left out, nothing is imported yet."""
    if "transformers" in sys.modules or _COMPILER in sys.modules:
        return
    importlib.import_module("torch")
    try:
        with _standing_in(), _without_sharding():
            for name in MODULES:
                importlib.import_module(name)
    except Exception:  # whatever another version makes of it
        _forget("transformers")


def _unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """A decorator, with arguments or without."""
    return function if callable(function) else _unchanged


class _StandIn(ModuleType):
    """Has any name: an empty class, or a decorator that changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _unchanged


class _StandIns(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name == _COMPILER or _is_below(_BATCHING, name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _COMPILER:  # some of its modules are cheap, and needed
            torch_directory = Path(str(sys.modules["torch"].__file__)).parent
            module.__path__ = [str(torch_directory / "_dynamo")]


@contextmanager
def _standing_in() -> Iterator[None]:
    finder = _StandIns()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)


@contextmanager
def _without_sharding() -> Iterator[None]:
    modules = [importlib.import_module(name) for name in _ASKED_AT]
    asked: list[Callable[[], bool]] = [getattr(module, _SHARDING) for module in modules]
    for module in modules:
        setattr(module, _SHARDING, lambda: False)
    try:
        yield
    finally:
        for module, function in zip(modules, asked, strict=True):
            setattr(module, _SHARDING, function)


def _is_below(package: str, name: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if _is_below(package, name)]:
        del sys.modules[name]
