"""Hides what is newer than AVX2 from PyTorch and from the project's kernels, in the process that finds this on its path
(`tests/avx2/__main__.py`); where neither is installed or imported it does nothing."""

import ctypes
import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

HIDDEN = re.compile(r"avx512|avx_?vnni|avx10|avx_ne|avx_ifma|amx|gfni|vaes|vpclmulqdq")


def limit_torch() -> None:
    """Loads its libc10 first, and clears what `cpuinfo` there has found. The order of the fields is that of
    `struct cpuinfo_x86_isa` in its cpuinfo.h."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    torch = Path(spec.origin).parent
    header = (torch / "include/cpuinfo.h").read_text(encoding="utf-8")
    body = re.search(r"struct cpuinfo_x86_isa \{(.*?)\n\};", header, re.DOTALL)
    assert body is not None, "this PyTorch's cpuinfo.h has another form"
    # What 32-bit processors alone have stands in blocks of its own.
    fields = re.findall(r"\bbool (\w+);", re.sub(r"#if CPUINFO_ARCH_X86\n.*?#endif", "", body[1], flags=re.DOTALL))
    library = ctypes.CDLL(str(torch / "lib/libc10.so"), mode=ctypes.RTLD_GLOBAL)
    library.cpuinfo_initialize()
    isa = (ctypes.c_bool * len(fields)).in_dll(library, "cpuinfo_isa")
    there = [isa[fields.index(field)] for field in ("sse3", "avx2")]
    assert all(there), "the fields of this PyTorch's cpuinfo lie elsewhere"
    for place, field in enumerate(fields):
        if HIDDEN.search(field):
            isa[place] = False


def older(level: str) -> bool:
    return HIDDEN.search(level) is None


class KernelLevels:
    """Finds `native/library.py` once, whose kernels then report no level above `avx2`."""

    module = "services.executor.native.library"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            reported = module._levels_of  # what all that asks for levels goes through
            module._levels_of = lambda library: tuple(filter(older, reported(library)))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


limit_torch()
sys.meta_path.insert(0, KernelLevels())  # type: ignore[arg-type]
