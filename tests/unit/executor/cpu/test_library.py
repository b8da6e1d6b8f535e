"""A compiled library that is older than the Python beside it is not used."""

import ctypes

import pytest

from services.executor.native import library


class Compiled:
    """A library whose structures have these sizes."""

    def __init__(self, sizes: list[int]) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

        @kind
        def rz_sizes(out: int) -> None:
            (ctypes.c_int64 * len(sizes)).from_address(out)[:] = sizes

        self.rz_sizes = rz_sizes


def test_structures_of_other_sizes_are_refused() -> None:
    ours = [ctypes.sizeof(kind) for kind in (library.Linear, library.Layer, library.Model, library.Step)]
    assert library._has_our_structures(Compiled(ours))
    for index in range(len(ours)):
        theirs = list(ours)
        theirs[index] -= 8
        assert not library._has_our_structures(Compiled(theirs))
    assert not library._has_our_structures(object())


def test_what_was_not_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.DISABLE, raising=False)
    monkeypatch.setattr(library, "compiled", lambda: None)
    assert "install the package again" in library.why_not.__wrapped__()


def test_the_library_that_is_here_has_our_structures() -> None:
    if library.compiled() is None:
        pytest.skip("no C compiler was there when the package was installed")
    assert library._has_our_structures(library.compiled())
