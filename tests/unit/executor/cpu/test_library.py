"""A compiled library that is older than the Python beside it is not used."""

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import structlog

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
        library.RzLinear,
        library.RzLayer,
        library.RzModel,
        library.RzStep,
        library.RzCodes,
        library.RzExperts,
        library.RzRecurrent,
        library.RzLatent,
        library.RzAdapted,
        library.RzLowRank,
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
    file: str  # that has it; "" where others can call it
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
def test_a_level_has_its_own_instructions(functions: list[Function], level: str, own: str, beyond: str) -> None:
    of_level = [one for one in functions if one.file == f"{level}.c" or one.name.endswith(f"_{level}")]
    assert len(of_level) > 40
    assert [one.name for one in of_level if re.search(own, one.body)]
    # Adapters have few rows each, for which tiles are not worth being set up.
    others = [one for one in of_level if level != "amx" or not re.match("(shrink|expand)_", one.name)]
    assert not [one.name for one in others if re.search(beyond, one.body)]


WIDTHS = {"zmm": 64, "ymm": 32, "xmm": 16}
OF_IMMEDIATES = {"movb": 1, "movw": 2, "movl": 4, "movq": 8}


def stored(line: str) -> tuple[str, range] | None:
    """The base register of a store, and the bytes that it writes, from the register on."""
    store = re.search(r"\t(\w+) +(?:%(\w+)|\$\S+),(-?0x[0-9a-f]+|)\((%\w+)\)$", line.split("#")[0].rstrip())
    if store is None or not store[1].startswith(("mov", "vmov")):
        return None
    mnemonic, source, offset, base = store.groups()
    if source is None:
        width = OF_IMMEDIATES[mnemonic]
    elif mnemonic in ("vmovd", "vmovq"):
        width = 4 if mnemonic == "vmovd" else 8
    elif source[:3] in WIDTHS:
        width = WIDTHS[source[:3]]
    else:
        width = 1 if re.fullmatch(r"[abcd][lh]|\w+l|r\d+b", source) else 8
        width = 2 if re.fullmatch(r"[abcd]x|[sd]i|[bs]p|r\d+w", source) else width
        width = 4 if re.fullmatch(r"e\w\w|r\d+d", source) else width
    first = int(offset or "0", 16)
    return base, range(first, first + width)


@disassembles
def test_tiles_are_shaped_by_what_was_stored_before(functions: list[Function]) -> None:
    """ldtilecfg reads 64 bytes, and a compiler that is told of fewer may leave the stores of the others out."""
    shaped = 0
    for function in functions:
        written: dict[str, set[int]] = {}
        for line in function.body.splitlines():
            if store := stored(line):
                written.setdefault(store[0], set()).update(store[1])
            if read := re.search(r"\tldtilecfg +(-?0x[0-9a-f]+|)\((%\w+)\)", line):
                first = int(read[1] or "0", 16)
                assert set(range(first, first + 64)) <= written.get(read[2], set()), (function.name, line)
                shaped += 1
    assert shaped


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What this processor computes wrongly, by level."""
    told = {"best": "", "plain": ""}
    cached = (library.why_not, library._tell_wrong_levels)
    monkeypatch.setattr(library, "_present", lambda: tuple(told))
    monkeypatch.setattr(library, "_wrong_at", told.__getitem__)
    monkeypatch.setattr(library, "compiled", lambda: object())
    monkeypatch.setattr(library, "kernels_at", lambda level: SimpleNamespace(level=level))
    monkeypatch.setattr(library, "_chosen", "")
    monkeypatch.delenv(library.LEVEL, raising=False)
    monkeypatch.delenv(library.DISABLE, raising=False)
    for function in cached:
        function.cache_clear()
    yield told
    for function in cached:
        function.cache_clear()


def test_a_level_that_computes_wrongly_is_left_for_the_next(proofs: dict[str, str]) -> None:
    proofs["best"] = "products of bf16"
    with structlog.testing.capture_logs() as logs:
        library.choose_level("")
        library.choose_level("")
    assert library.load_library().level == "plain"
    told = {"event": "cpu_level_computes_wrongly", "log_level": "error", "instead": ("plain",)}
    assert logs == [{**told, "cpu_level": "best", "kernels": "products of bf16"}]
    with pytest.raises(ConfigurationError) as refused:
        library.choose_level("best")
    assert str(refused.value) == (
        "RYZANSTEIN_CPU_LEVEL is 'best', at which this CPU computes wrong products of bf16; leave it empty, or choose "
        "one of: plain."
    )


def test_a_processor_that_computes_wrongly_at_every_level_has_no_kernels(proofs: dict[str, str]) -> None:
    proofs.update(best="products of bf16", plain="attention over int8 keys")
    assert library.load_library() is None
    assert library.why_not() == (
        "this processor, or what emulates it, computes wrongly: at best products of bf16; at plain attention over int8 "
        "keys"
    )


def test_a_level_of_a_processor_that_has_none_is_refused(
    proofs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a hypervisor hides AVX2 or F16C."""
    proofs.clear()
    assert library.load_library() is None
    assert "AVX2 with FMA and F16C" in library.why_not()
    with pytest.raises(ConfigurationError) as refused:
        library.choose_level("avx2")
    assert str(refused.value) == (
        "RYZANSTEIN_CPU_LEVEL is 'avx2', which is not a level that this CPU has; leave it empty for PyTorch, since no "
        "other is left."
    )
    monkeypatch.setenv(library.DISABLE, "0")
    library.choose_level("avx2")  # they are off, whatever the level


def test_the_environment_chooses_a_level_where_nothing_else_does(
    proofs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.LEVEL, "plain")
    assert library.load_library().level == "plain"
    library.choose_level("best")
    assert library.load_library().level == "best"
    library.choose_level("")
    assert library.load_library().level == "plain"
    monkeypatch.setenv(library.LEVEL, "other")
    with pytest.raises(ConfigurationError, match="'other', which is not a level that this CPU has"):
        library.choose_level("")


def test_levels_behind_the_one_that_is_chosen_are_not_proven(
    proofs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    proven: list[str] = []
    monkeypatch.setattr(library, "_wrong_at", lambda level: proven.append(level) or proofs[level])
    library.choose_level("")
    assert library.load_library().level == "best"
    assert {*proven} == {"best"}


def test_every_level_of_this_processor_proves_itself() -> None:
    if library.compiled() is None:
        pytest.skip("no C compiler was there when the package was installed")
    assert library.wrong_levels() == {}
    assert set(library.levels()) == set(library._levels_of(library.compiled()))


def test_the_best_level_is_chosen_where_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    if library.why_not():
        pytest.skip(f"native kernels: {library.why_not()}")
    monkeypatch.setattr(library, "_chosen", "")
    monkeypatch.delenv(library.LEVEL, raising=False)
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
