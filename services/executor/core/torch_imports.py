"""Imports PyTorch without what only tensors without data need: a quarter of the time and 18 MB of `import torch`.

Those modules register how operators compute shapes alone, in Python, thousands of them. A rank that reads packed
weights from the cache never asks; building a model does, and imports them then.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# These import each other, and only in this order. What is put off would have imported the first; `torch._dynamo`, which
# a rank on a GPU imports before it builds a model, imports the second.
FIRST, SECOND = "torch._prims", "torch.utils._content_store"
# Where a version of PyTorch has no such modules, or needs what is in them at once, nothing is put off.
PUT_OFF = ("torch._meta_registrations", "torch.distributed._meta_registrations")


class _Empty(MetaPathFinder, Loader):
    """Makes empty modules of those that are put off."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in PUT_OFF else None

    def exec_module(self, module: ModuleType) -> None:
        return


class _InOrder(MetaPathFinder):
    """Imports the first before the second."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == SECOND and FIRST not in sys.modules:
            importlib.import_module(FIRST)
        return None


def import_torch() -> None:
    """The first import of PyTorch in this process; without effect where it is not the first."""
    if "torch" in sys.modules:
        return
    finder = _Empty()
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("torch")
    finally:
        sys.meta_path.remove(finder)
    sys.meta_path.insert(0, _InOrder())


def import_rest() -> None:
    """What was put off, before a tensor on the meta device is computed with."""
    for name in PUT_OFF:
        module = sys.modules.get(name)
        if module is not None and isinstance(module.__spec__ and module.__spec__.loader, _Empty):
            del sys.modules[name]
            importlib.import_module(name)
