"""A compiled library that is older than the Python beside it is not used."""

import ctypes
import platform
import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

from services.executor.native import library
from shared.errors import ConfigurationError

disassembles = pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() != "x86_64", reason="needs objdump, and x86-64"
)


class Compiled:
    """A library whose structures have these sizes."""

    def __init__(self, sizes: list[int]) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

        @kind
        def rz_sizes(out: int) -> None:
            (ctypes.c_int64 * len(sizes)).from_address(out)[:] = sizes

        self.rz_sizes = rz_sizes


def test_structures_of_other_sizes_are_refused() -> None:
    kinds = (
        library.Linear,
        library.Layer,
        library.Model,
        library.Step,
        library.Codes,
        library.Experts,
        library.Recurrent,
        library.Latent,
        library.Adapted,
        library.LowRank,
    )
    ours = [ctypes.sizeof(kind) for kind in kinds]
    assert library._has_our_structures(Compiled(ours))
    for index in range(len(ours)):
        theirs = list(ours)
        theirs[index] -= 8
        assert not library._has_our_structures(Compiled(theirs))
    assert not library._has_our_structures(object())


def test_a_library_without_one_of_our_functions_is_refused() -> None:
    """It was compiled before that function came, and the sizes of structures are the same."""

    class Older:
        def __init__(self, missing: str) -> None:
            self._missing = missing

        def __getattr__(self, name: str) -> object:
            if name == self._missing or not name.startswith("rz_"):
                raise AttributeError(name)
            return self._levels

        def _levels(self, out: ctypes.Array[ctypes.c_char]) -> None:
            out.value = b"best plain"

    assert library._has_our_functions(Older(""))
    for missing in ("rz_levels", "rz_ring_open", "rz_quantize_plain", "rz_decoder_new_best"):
        assert not library._has_our_functions(Older(missing)), missing


def test_what_was_not_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.DISABLE, raising=False)
    monkeypatch.setattr(library, "compiled", lambda: None)
    assert "pip install --force-reinstall" in library.why_not.__wrapped__()


def test_the_library_that_is_here_has_our_structures() -> None:
    if library.compiled() is None:
        pytest.skip("no C compiler was there when the package was installed")
    assert library._has_our_structures(library.compiled())
    assert library._has_our_functions(library.compiled())


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Function(NamedTuple):
    name: str
    file: str
    """That has it; "" where others can call it."""
    body: str


@pytest.fixture(scope="module")
def functions() -> list[Function]:
    """Of the library."""
    file = library.library_file()
    if file is None:
        pytest.skip("no C compiler was there when the package was installed")
    owners, owner = {}, ""
    for line in said("objdump", "--syms", str(file)).splitlines():
        symbol = re.match(r"([0-9a-f]+) (.......)", line)
        if symbol and "f" in symbol[2]:
            owner = line.split()[-1]
        elif symbol:
            owners[symbol[1].lstrip("0")] = owner if symbol[2].startswith("l") else ""
    listing = said("objdump", "--disassemble", "--no-show-raw-insn", str(file))
    found = re.findall(r"^0*([0-9a-f]+) <([\w.]+)>:\n((?:.+\n)*)", listing, re.MULTILINE)
    return [Function(name, owners.get(address, ""), body) for address, name, body in found]


AVX = r"\tv[a-z0-9]+ .*"


@disassembles
def test_what_runs_on_every_processor_has_instructions_of_every_processor(functions: list[Function]) -> None:
    """A wheel is compiled elsewhere: what is called before `rz_levels` has answered, and shared memory, which asks
    nothing of the processor, must not begin with AVX."""
    bodies = {function.name: function.body for function in functions}
    for name in ("rz_levels", "rz_sizes", *library._RING_FUNCTIONS):
        assert not re.search(AVX, bodies[name]), name


@disassembles
@pytest.mark.parametrize(
    ("level", "own", "beyond"),
    [
        ("avx2", AVX, r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])|\tvpdp|\tvdp|%tmm"),
        ("avxvnni", AVX, r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])|\tvdp|%tmm"),
        ("avx512vnni", "%zmm", r"\tvdp|\tvcvtne|%tmm"),
        ("avx512bf16", r"\tvdpbf16ps", "%tmm"),
        ("amx", r"\ttdpbf16ps", r"\tvdpbf16ps"),
    ],
)
def test_a_level_has_its_own_instructions(
    functions: list[Function], level: str, own: str, beyond: str
) -> None:
    of_level = [one for one in functions if one.file == f"{level}.c" or one.name.endswith(f"_{level}")]
    assert len(of_level) > 40
    assert [one.name for one in of_level if re.search(own, one.body)]
    # Adapters have few rows each, for which tiles are not worth being set up.
    others = [one for one in of_level if level != "amx" or not re.match("(shrink|expand)_", one.name)]
    assert not [one.name for one in others if re.search(beyond, one.body)]


def test_the_best_level_is_chosen_where_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.why_not():
        pytest.skip(f"native kernels: {library.why_not()}")
    monkeypatch.setattr(library, "_chosen", "")
    assert library.load_library().level == library.levels()[0]
    for level in library.levels():
        library.choose_level(level)
        assert library.load_library().level == level
    library.choose_level("")
    assert library.load_library().level == library.levels()[0]


@pytest.mark.parametrize("level", ["avx1024", "AVX2", "neon amx"])
def test_a_level_that_this_cpu_lacks_is_refused_with_those_that_it_has(level: str) -> None:
    if library.why_not():
        pytest.skip(f"native kernels: {library.why_not()}")
    with pytest.raises(ConfigurationError) as refused:
        library.choose_level(level)
    assert str(refused.value) == (
        f"RYZANSTEIN_CPU_LEVEL is {level!r}, which is not a level that this CPU has; leave it empty, or choose one of: "
        f"{', '.join(library.levels())}."
    )
