"""A kernel that is compiled in the middle of a step is no hang.

Triton compiles a kernel when it is first launched with arguments of a new kind, which takes seconds: longer than a rank
may stand still. `warm_up` meets most of them before the ring is ready, and cannot meet all.
"""

from collections.abc import Callable
from typing import Any

LONGEST = 120.0
"""Seconds that one kernel may take to compile."""


def excuse_compiling(excuse: Callable[[float], None], runtime: Any = None) -> None:
    """Has `excuse` (seconds for which the rank may stand still; 0: no longer) called around every compilation.
    `runtime`: `triton.knobs.runtime`; None: that of this process, and nothing where there is no Triton."""
    if runtime is None:
        try:
            from triton import knobs
        except ImportError:
            return
        runtime = knobs.runtime
    before, after = runtime.jit_cache_hook, runtime.jit_post_compile_hook

    def begins(**about: Any) -> Any:
        excuse(LONGEST)
        return before(**about) if before is not None else None

    def is_over(**about: Any) -> Any:
        excuse(0.0)
        return after(**about) if after is not None else None

    runtime.jit_cache_hook, runtime.jit_post_compile_hook = begins, is_over
