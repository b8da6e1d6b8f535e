"""Triton's interpreter without two things that take two thirds of its time and say nothing about kernels.

Whenever one function of a kernel calls another it looks through all names of `triton.language` for those that it is to
replace: once is enough, for what interprets does not compile. And each sum and product of integers is computed again in
64 bits to see that it does not overflow: at the sizes of tests it cannot.
"""

from typing import Any

try:
    from triton.runtime import interpreter
except ImportError:  # where Triton is not, its tests are skipped
    interpreter = None


def make_cheap() -> None:
    """From now on, in this process."""
    if interpreter is not None:
        interpreter._patch_lang = _patch_once
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


class _Kept:
    """Stands for a scope whose changes stay."""

    def restore(self) -> None:
        return


_patch = getattr(interpreter, "_patch_lang", None)
_patched: set[int] = set()
"""Modules of kernels, by their names' dictionaries."""


def _patch_once(function: Any) -> _Kept:
    names = id(function.__globals__)
    if names not in _patched:
        assert _patch is not None
        _patch(function)
        _patched.add(names)
    return _Kept()
