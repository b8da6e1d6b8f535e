"""A compiled library that is older than the Python beside it is not used."""

import ctypes
import re
import shutil
import subprocess

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
    assert "pip install --force-reinstall" in library.why_not.__wrapped__()


def test_the_library_that_is_here_has_our_structures() -> None:
    if library.compiled() is None:
        pytest.skip("no C compiler was there when the package was installed")
    assert library._has_our_structures(library.compiled())


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
def test_what_runs_on_every_processor_has_instructions_of_every_processor() -> None:
    """A wheel is compiled elsewhere: what is called before `rz_supported`, and shared memory, which asks nothing of
    the processor, must not begin with AVX."""
    file = library.library_file()
    if file is None:
        pytest.skip("no C compiler was there when the package was installed")
    command = ["objdump", "--disassemble", "--no-show-raw-insn", str(file)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bodies = dict(re.findall(r"^[0-9a-f]+ <(\w+)>:\n((?:.+\n)*)", listing, re.MULTILINE))
    for name in ("rz_supported", "rz_sizes", *library._RING_FUNCTIONS):
        assert not re.search(r"\tv[a-z0-9]+ .*", bodies[name]), name
    assert re.search(r"\tv[a-z0-9]+ .*", bodies["rz_attend"]), "the search finds AVX where there is some"
