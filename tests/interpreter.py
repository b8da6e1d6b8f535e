"""Triton's interpreter, made cheap, and nearer to a GPU.

Left out, since it says nothing about kernels: that each function looks through all names of `triton.language` for
those that it is to replace whenever it calls another; that a table of NumPy's types is made for each look into it; that
sums and products of integers are computed again in 64 bits to see that they do not overflow; that memory is copied onto
itself after each launch; and most of coverage's tracer, which looks at the first program and the last of a launch.

As a GPU has it: bf16 is rounded to the nearest, and what is computed of it is; products of bf16; float8; inline
assembly (`tests/inline_assembly.py`). So kernels can be run with the constants that they are compiled with, as
`tests/pretend_gpu` does. Quotients by the plain operator, `rsqrt` and `exp2` are off by a unit in the last place, so
that nobody builds on them (PTX ISA, "div", "rsqrt", "ex2").

NumPy's BLAS sums the products of a tile's rows in orders that depend on the row and on the CPU; a GPU does not. In
float64 these orders make no difference that float32 would show.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.inline_assembly import run_packed

try:
    import triton.language as tl
    from triton.runtime import interpreter
except ImportError:  # where Triton is not, its tests are skipped
    interpreter = None

Numbers = NDArray[Any]


def prepare() -> None:
    """From now on, in this process."""
    if interpreter is None:
        return
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _type_of
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    executor.__init__ = _set_up
    executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    executor._restore_args_dev = lambda self, *args: None
    builder.cast_impl = builder.create_fp_to_fp = _cast
    builder.binary_op = _binary
    builder.create_fdiv = lambda self, a, b: _roughly(self.binary_op(a, b, np.divide))
    builder.create_rsqrt = lambda self, a: _roughly(_handle(1 / np.sqrt(a.data), a.dtype.scalar))
    builder.create_exp2 = lambda self, a: _roughly(_handle(np.exp2(a.data), a.dtype.scalar))
    builder.get_bf16 = lambda self, number: _handle(_rounded(np.array([number]), tl.bfloat16), tl.bfloat16)
    builder.create_dot = _dot
    builder.create_inline_asm = _inline_assembly


# --- numbers -------------------------------------------------------------------------------------


def _handle(data: Numbers, kind: Any) -> Any:
    return interpreter.TensorHandle(data, kind)


def _by_torch(kind: Any) -> torch.dtype | None:
    """Of what NumPy knows by its bits only."""
    return {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}.get(kind.name)


def _widened(data: Numbers, kind: Any) -> Numbers:
    """`data` of `kind`, in a type that NumPy computes with."""
    if (dtype := _by_torch(kind)) is None:
        return data
    found: Numbers = torch.from_numpy(np.ascontiguousarray(data)).view(dtype).float().numpy()
    return found


def _rounded(data: Numbers, kind: Any) -> Numbers:
    """As numbers of `kind`, to the nearest, ties to even."""
    if (dtype := _by_torch(kind)) is None:
        return data.astype(interpreter._get_np_dtype(kind))
    short = torch.from_numpy(np.ascontiguousarray(data, np.float32)).to(dtype)
    bits: Numbers = short.view(torch.int16 if short.itemsize == 2 else torch.int8).numpy()
    return bits.view(interpreter._get_np_dtype(kind))


def _cast(builder: Any, a: Any, into: Any, rounding: object = None) -> Any:
    of, kind = a.dtype.scalar, into.scalar
    return _handle(a.data if of == kind else _rounded(_widened(a.data, of), kind), kind)


def _binary(builder: Any, a: Any, b: Any, operation: Callable[..., Numbers]) -> Any:
    kind = a.dtype.scalar
    if not isinstance(kind, tl.pointer_type) and _by_torch(kind):
        made = operation(_widened(a.data, kind), _widened(b.data, b.dtype.scalar))
        return _handle(made if made.dtype == bool else _rounded(made, kind), kind)
    made = operation(a.data, b.data)
    if not interpreter._validate_np_data_size(made, kind):
        made = made.astype(interpreter._get_np_dtype(kind))
    return _handle(made, kind)


def _roughly(made: Any) -> Any:
    """Every other number is a unit in the last place higher."""
    data = made.data
    if data.dtype == np.float32:
        odd = (data.view(np.uint32) & 1 == 1) & np.isfinite(data)
        made.data = np.where(odd, np.nextafter(data, np.float32(np.inf)), data)
    return made


def _dot(builder: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
    """Of two tiles, added to the tile `sums`; `options` are for GPUs."""
    left, right = (_widened(one.data, one.dtype.scalar).astype(np.float64) for one in (a, b))
    return _handle(np.matmul(left, right).astype(sums.data.dtype) + sums.data, sums.dtype.scalar)


class _Results(list[Any]):
    get_result = list.__getitem__


def _inline_assembly(
    builder: Any, text: str, constraints: str, given: list[Any], kinds: list[Any], pure: bool, pack: int
) -> _Results:
    (words,) = given
    found = run_packed(text, words.data.view(np.uint32), len(kinds), pack)
    return _Results(_handle(one, kind.scalar) for one, kind in zip(found, kinds, strict=True))


# --- what takes time -----------------------------------------------------------------------------


class _Kept:
    """Stands for a scope whose changes stay."""

    def restore(self) -> None:
        return


def _type_of(kind: Any) -> np.dtype[Any]:
    name = "pointer" if isinstance(kind.scalar, tl.pointer_type) else kind.scalar.name
    if name not in _types:
        assert _find_type is not None
        _types[name] = _find_type(kind)
    return _types[name]


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


_initialize = interpreter.GridExecutor.__init__ if interpreter is not None else None
_patch = getattr(interpreter, "_patch_lang", None)
_find_type = getattr(interpreter, "_get_np_dtype", None)
_types: dict[str, np.dtype[Any]] = {}
_patched: set[int] = set()  # modules of kernels, by their names' dictionaries


def _patch_once(function: Any) -> _Kept:
    function = inspect.unwrap(function)
    names = id(function.__globals__)
    if names not in _patched:
        assert _patch is not None
        _patch(function)
        _patched.add(names)
    return _Kept()
