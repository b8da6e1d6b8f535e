"""The wheel and the sdist: what is in them, and that an environment which has the wheel serves."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.cli.supervision.nats_server import find_binary
from services.executor.native.library import why_not
from shared.process import VERSION
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "shared")
KERNELS = "services/executor/native/_kernels.abi3.so"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LIBRARY = f"ryzanstein__mypyc{SUFFIX}"
COMPILED = {name.removesuffix(".py") + SUFFIX for name in PROJECT["tool"]["ryzanstein"]["compiled"]} | {LIBRARY}
BESIDE = ("pyproject.toml", "setup.py", "README.md", "LICENSE")  # what a build needs beside the packages
# Of the environment of what is installed: without the tests' own way to the tree.
WITHOUT_TREE = {"PYTHONPATH": ""}


def sources() -> set[str]:
    """The files of the packages, by their path in the tree; what compilers left there is none."""
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file())
    return {
        str(path.relative_to(ROOT))
        for path in files
        if "__pycache__" not in path.parts and path.suffix not in (".so", ".pyc")
    }


def build(directory: Path, **environment: str) -> Path:
    """`python -m build`, of a copy that has nothing but sources: an sdist, and of that a wheel, in `directory`."""
    tree = directory / "tree"
    for name in (*sources(), *BESIDE):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(tree)]
    built = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": "", **environment}
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return next(directory.glob("*.whl"))


def install(wheel: Path, directory: Path) -> Path:
    """An environment that has `wheel`, and of this one's packages what it depends on; gives its programs' folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = directory / "lib" / version / "site-packages" / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")
    (directory / "bin" / "nats-server").symlink_to(find_binary())
    return directory / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built where no compiler is: in seconds, where the other takes minutes."""
    return build(tmp_path_factory.mktemp("plain"), CC="no-compiler-is-here", RYZANSTEIN_COMPILE="0")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A user's project, which has packages of the same names."""
    for name in PACKAGES:
        (tmp_path / "project" / name).mkdir(parents=True)
        (tmp_path / "project" / name / "__init__.py").write_text("raise SystemExit('not ours')")
    return tmp_path / "project"


def said(command: list[str], cwd: Path) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, **WITHOUT_TREE}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def check_files(wheel: Path, compiled: set[str]) -> None:
    """It has the packages, what is `compiled` of them, what a package index shows, and nothing else."""
    about = f"ryzanstein-{VERSION}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"{about}METADATA").decode()
    ours = {name for name in names if not name.startswith(about)}
    assert ours == {name for name in sources() if not name.endswith((".c", ".h"))} | compiled
    assert f"{about}licenses/LICENSE" in names
    assert f"\nVersion: {VERSION}\n" in metadata
    assert metadata.endswith((ROOT / "README.md").read_text())


@pytest.mark.nightly
def test_a_wheel_has_the_packages_and_what_is_compiled_of_them(wheel: Path) -> None:
    assert wheel.name == f"ryzanstein-{VERSION}-cp311-abi3-{sysconfig.get_platform().replace('-', '_')}.whl"
    check_files(wheel, {KERNELS, *COMPILED})


def test_an_sdist_has_every_source(plain: Path) -> None:
    with tarfile.open(next(plain.parent.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sources() | set(BESIDE) <= names
    assert not [name for name in names if "mypyc" in name], "made of the sources"


@pytest.mark.nightly
@pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")
def test_what_is_installed_serves_with_native_kernels_and_compiled_modules(
    wheel: Path, elsewhere: Path, tmp_path: Path, model_directory: Path
) -> None:
    programs = install(wheel, tmp_path / "installed")
    where = said(
        [str(programs / "python"), "-P", "-c", "import services, shared; print(services.__file__, shared.__file__)"],
        elsewhere,
    )
    assert all(Path(file).is_relative_to(programs.parent) for file in where.split())
    assert said([str(programs / "ryzanstein"), "--version"], elsewhere) == f"ryzanstein {VERSION}"
    environment = {**WITHOUT_TREE, "RYZANSTEIN_WEIGHT_CACHE_DIRECTORY": str(tmp_path / "packed")}
    command = [str(programs / "ryzanstein")]
    with Stack(tmp_path / "data", command=command, cwd=elsewhere, **environment) as stack:
        assert "distributed system" in stack.output, "one answer is streamed at the start"
        mapped = [Path(f"/proc/{process.pid}/maps").read_text() for process in stack.descendants()]
        for name, path in (("_kernels", KERNELS), ("ryzanstein__mypyc", LIBRARY)):
            files = {line.split()[-1] for maps in mapped for line in maps.splitlines() if name in line}
            assert files == {str(next(programs.parent.glob(f"lib/*/site-packages/{path}")))}
        for page in ("/", "/docs", "/console/app/console.js"):
            reply = httpx.get(stack.url + page, headers={"accept": "text/html"}, trust_env=False)
            assert reply.status_code == 200
            assert reply.content


def test_without_a_compiler_the_package_installs_and_says_what_it_lacks(plain: Path, tmp_path: Path) -> None:
    check_files(plain, set())
    python = install(plain, tmp_path / "installed") / "python"
    why = "from services.executor.native.library import why_not; print(why_not())"
    assert said([str(python), "-P", "-c", why], tmp_path).startswith("they were not compiled")


@pytest.mark.nightly
def test_modules_are_left_as_python_where_no_compiler_is(tmp_path: Path) -> None:
    check_files(build(tmp_path, CC="no-compiler-is-here"), set())
