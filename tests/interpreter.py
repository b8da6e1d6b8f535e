"""Triton's interpreter without three things that take most of its time and say nothing about kernels, and with products
whose bits do not depend on a row's place in its tile.

Whenever one function of a kernel calls another it looks through all names of `triton.language` for those that it is to
replace: once is enough, for what interprets does not compile. And each sum and product of integers is computed again in
64 bits to see that it does not overflow: at the sizes of tests it cannot. And coverage's tracer, which is called for
each line of the interpreter too, looks at the first program and the last of a launch: all run the same lines but for
branches at the edges.

NumPy's BLAS sums the products of a tile's rows in orders that depend on the row and on the CPU; a GPU does not. In
float64 these orders make no difference that float32 would show.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    from triton.runtime import interpreter
except ImportError:  # where Triton is not, its tests are skipped
    interpreter = None


def make_cheap() -> None:
    """From now on, in this process."""
    if interpreter is not None:
        interpreter._patch_lang = _patch_once
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        interpreter.GridExecutor.__init__ = _set_up
        interpreter.InterpreterBuilder.create_dot = _dot


def _dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """Of two tiles, added to the tile `d`; `options` are for GPUs."""
    if not all(tile.data.dtype in (np.float16, np.float32) for tile in (a, b, d)):
        assert _own_dot is not None
        return _own_dot(builder, a, b, d, *options)
    product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


class _Kept:
    """Stands for a scope whose changes stay."""

    def restore(self) -> None:
        return


def _set_up(executor: Any, function: Callable[..., None], *arguments: Any) -> None:
    assert _initialize is not None
    _initialize(executor, function, *arguments)
    executor.fn = _traced_at_the_ends(function)


def _traced_at_the_ends(function: Callable[..., None]) -> Callable[..., None]:
    """The function of a kernel, out of the tracer's sight but in the first program and the last."""

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        builder, tracer = interpreter.interpreter_builder, sys.gettrace()
        last = tuple(count - 1 for count in builder.grid_dim)
        if tracer is None or builder.grid_idx in ((0, 0, 0), last):
            return function(**arguments)
        sys.settrace(None)
        try:
            return function(**arguments)
        finally:
            sys.settrace(tracer)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run


_own_dot = interpreter.InterpreterBuilder.create_dot if interpreter is not None else None
_initialize = interpreter.GridExecutor.__init__ if interpreter is not None else None
_patch = getattr(interpreter, "_patch_lang", None)
_patched: set[int] = set()
"""Modules of kernels, by their names' dictionaries."""


def _patch_once(function: Any) -> _Kept:
    function = inspect.unwrap(function)
    names = id(function.__globals__)
    if names not in _patched:
        assert _patch is not None
        _patch(function)
        _patched.add(names)
    return _Kept()
