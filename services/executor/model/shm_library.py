"""The C half of the shared memory collectives: `native/shared_memory.c`, compiled and loaded once.

The compiled file is kept in the user's cache under a name made from its source.
"""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from platformdirs import user_cache_path

_SOURCE = Path(__file__).parents[1] / "native" / "shared_memory.c"
_FLAGS = ("-O3", "-fno-math-errno", "-std=gnu11", "-shared", "-fPIC")
_POINTER, _INT, _SIZE, _TIME = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_int64
_FUNCTIONS: dict[str, tuple[object, list[type]]] = {
    "rz_ring_area_bytes": (_SIZE, [_INT, _INT, _SIZE]),
    "rz_ring_open": (_POINTER, [_POINTER, _INT, _INT, _INT, _SIZE]),
    "rz_ring_watch": (None, [_POINTER, _POINTER, _INT]),
    "rz_ring_close": (None, [_POINTER]),
    "rz_ring_abort": (None, [_POINTER]),
    "rz_ring_sum_f32": (_INT, [_POINTER, _POINTER, _SIZE, _TIME]),
    "rz_ring_sum_bf16": (_INT, [_POINTER, _POINTER, _SIZE, _TIME]),
    "rz_ring_sum_f32_part": (_INT, [_POINTER, _POINTER, _SIZE, _INT, _INT, _TIME]),
    "rz_ring_part": (_SIZE, [_SIZE, _INT, _INT]),
    "rz_ring_gather": (_INT, [_POINTER, _POINTER, _POINTER, _POINTER, _TIME]),
    "rz_ring_barrier": (_INT, [_POINTER, _TIME]),
    "rz_ring_busy_ns": (_TIME, [_POINTER, _INT]),
    "rz_ring_waited_ns": (_TIME, [_POINTER, _INT]),
}


@lru_cache(maxsize=1)
def shm_library() -> ctypes.CDLL | None:
    """The library, its functions typed; None where it cannot be had (no C compiler)."""
    path = _compiled()
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compiled() -> Path | None:
    header = _SOURCE.with_suffix(".h")
    digest = hashlib.sha256(_SOURCE.read_bytes() + header.read_bytes() + repr(_FLAGS).encode()).hexdigest()
    target = user_cache_path("ryzanstein") / "native" / f"shared_memory-{digest[:16]}.so"
    if target.exists():
        return target
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / target.name
        command = [compiler, *_FLAGS, "-o", str(made), str(_SOURCE)]
        if subprocess.run(command, capture_output=True, check=False).returncode:  # noqa: S603  # our own source
            return None
        made.replace(target)
    return target
