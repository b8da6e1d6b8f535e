"""The examples of docs/clients as programs: built where their language is at hand, else skipped with the reason."""

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "docs" / "clients"
CLIENT = ROOT / "clients" / "python" / "src"
TYPESCRIPT = ROOT / "clients" / "typescript"
RUST = ROOT / "clients" / "rust"
# Kept between runs: what is built is built once.
BUILT = Path(tempfile.gettempdir()) / f"ryzanstein-examples-{os.getuid()}"
CARGO_TARGET = BUILT / "cargo"
LINTER = "oxlint@1.94.0"
NODE_WITH_WEBSOCKET = 22  # the first major version whose WebSocket needs no flag

Command = list[str]


def tool(name: str) -> str:
    """Skips the test where the language is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"EXAMPLES NOT RUN: {name} is not on this machine")
    return found


@functools.cache
def _failure(command: tuple[str, ...], directory: Path) -> str:
    """What a step that needs packages from outside says when it fails; tried once."""
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100, check=False)
    except subprocess.TimeoutExpired:
        return "it took more than 100 s"
    return done.stderr.strip()[-200:] or "it failed" if done.returncode else ""


def prepared(command: Command, directory: Path, why: str) -> None:
    """Skips the test where the step fails."""
    if failure := _failure(tuple(command), directory):
        pytest.skip(f"EXAMPLES NOT RUN: {why}: {failure}")


def blocks(package: Path, language: str) -> list[str]:
    """The programs of a README."""
    return re.findall(rf"```{language}\n(.*?)```", (package / "README.md").read_text(), re.DOTALL)


def python(name: str) -> Command:
    return [sys.executable, str(EXAMPLES / "python" / f"{name}.py")]


def python_script(source: str) -> Command:
    """A piece of a page that uses the client of this repository."""
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(CLIENT)!r})\n{source}"]


@functools.cache
def _javascript() -> Path:
    """A copy with its packages: the source tree stays as it is."""
    directory = BUILT / "javascript"
    shutil.copytree(EXAMPLES / "javascript", directory, dirs_exist_ok=True)
    npm = [tool("npm"), "ci", "--no-audit", "--no-fund", "--prefer-offline"]
    if not (directory / "node_modules" / "openai").exists():
        prepared(npm, directory, "npm cannot fetch the package openai")
    return directory


def javascript(name: str) -> Command:
    """Those that need no package run where npm reaches nothing."""
    node = tool("node")
    if name in ("resume", "websocket"):
        flags = ["--experimental-websocket"] if name == "websocket" and _node_major() < NODE_WITH_WEBSOCKET else []
        return [node, *flags, "--no-warnings", str(EXAMPLES / "javascript" / f"{name}.js")]
    return [node, str(_javascript() / f"{name}.js")]


@contextlib.contextmanager
def copied(*folders: Path) -> Iterator[tuple[Path, Path | None]]:
    """A copy of the folders, with their paths in the repository, and what to write once it is built; None: it is. It is
    one for these sources, and of one test process at a time."""
    made = {"node_modules", "dist", "target", "Cargo.lock"}
    files = sorted(
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and not made & set(path.relative_to(folder).parts)
    )
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    directory = BUILT / f"{folders[0].name}.{digest[:12]}"
    BUILT.mkdir(exist_ok=True)
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = directory / "built"
        if not built.exists():
            for folder in folders:
                target = directory / folder.relative_to(ROOT)
                shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*made))
        yield directory, None if built.exists() else built


@functools.cache
def typescript_client() -> Path:
    """The TypeScript client, built in a copy; the README's programs are among its examples, whose types are checked."""
    tool("node")
    npm = [tool("npm"), "ci", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=1"]
    with copied(TYPESCRIPT) as (copy, built):
        directory = copy / TYPESCRIPT.relative_to(ROOT)
        if built is not None:
            prepared(npm, directory, "npm cannot fetch the packages of clients/typescript")
            for number, source in enumerate(blocks(TYPESCRIPT, "js")):
                (directory / "examples" / f"readme_{number}.mjs").write_text(source)
            run_npm(directory, "run", "build")
            built.touch()
    return directory


def run_npm(directory: Path, *arguments: str) -> str:
    """What npm prints; fails with it when it does not end well."""
    done = subprocess.run(
        [tool("npm"), *arguments], cwd=directory, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@functools.cache
def linter() -> Command:
    """Oxlint, by its version: in a lock file of npm it would stand with the binaries of every platform."""
    directory = BUILT / LINTER
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "node_modules" / ".bin" / "oxlint"
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = ("--prefix", str(directory), "--no-save", "--no-audit", "--no-fund", "--prefer-offline")
        prepared([tool("npm"), "install", *options, LINTER], directory, "npm cannot fetch oxlint")
    prepared([str(program), "--version"], directory, "oxlint does not run on this Node or platform")
    return [str(program), "--deny-warnings"]


def typescript(name: str) -> Command:
    """`chat` and `resume` are one program there: every stream survives."""
    program = "stream" if name in ("chat", "resume") else name
    return [tool("node"), str(typescript_client() / "examples" / f"{program}.mjs")]


def typescript_script(source: str) -> Command:
    """A piece of a page, or of a test, that uses the TypeScript client."""
    entry = (typescript_client() / "dist" / "index.js").as_uri()
    return [tool("node"), "--input-type=module", "-e", source.replace('"ryzanstein-client"', f'"{entry}"')]


def _node_major() -> int:
    shown = subprocess.run([tool("node"), "--version"], capture_output=True, text=True, check=True).stdout
    return int(shown.removeprefix("v").partition(".")[0])


@functools.cache
def go(name: str) -> Command:
    BUILT.mkdir(exist_ok=True)
    target = BUILT / f"go-{name}"
    command = [tool("go"), "build", "-o", str(target), f"./{name}"]
    done = subprocess.run(command, cwd=EXAMPLES / "go", capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr  # it needs no packages
    return [str(target)]


def cargo_offline(directory: Path) -> Command:
    """Cargo with all crates at hand: those of its cache, of Debian's packages, or fetched now."""
    cargo = tool("cargo")
    debian = [
        *(cargo, "--config", 'source.crates-io.replace-with="debian"'),
        *("--config", 'source.debian.directory="/usr/share/cargo/registry"'),
    ]
    for command in ([cargo], debian):
        if not _failure((*command, "fetch", "--offline"), directory):
            return command
    prepared([cargo, "--config", "net.retry=0", "fetch"], directory, "cargo cannot fetch the crates")
    return [cargo]


@functools.cache
def rust_programs() -> Path:
    """The examples, and those of the crate's README as `readme_0`, ..., built in a copy; what cargo compiles of other
    crates is kept beside it. READMEs' models and keys are as they stand there."""
    tool("cargo")
    with copied(EXAMPLES / "rust", RUST) as (copy, built):
        if built is not None:
            directory = copy / "docs" / "clients" / "rust"
            programs = directory / "src" / "bin"
            for number, source in enumerate(blocks(RUST, "rust,no_run")):
                asked = re.sub('"http://127[^"]*"', 'std::env::var("RYZANSTEIN_URL").unwrap()', source)
                (programs / f"readme_{number}.rs").write_text(asked)
            run_cargo(directory, "build")
            for program in programs.glob("*.rs"):
                shutil.copy2(CARGO_TARGET / "debug" / program.stem, copy / program.stem)
            built.touch()
    return copy


def run_cargo(directory: Path, *arguments: str) -> str:
    """What cargo prints, for one test process at a time; fails with it when it does not end well."""
    BUILT.mkdir(exist_ok=True)
    with Path(f"{CARGO_TARGET}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [*cargo_offline(directory), *arguments, "--offline"],
            cwd=directory,
            env={**os.environ, "CARGO_TARGET_DIR": str(CARGO_TARGET)},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rust(name: str) -> Command:
    return [str(rust_programs() / name)]


def curl(name: str) -> Command:
    tool("curl")
    return [tool("bash"), str(EXAMPLES / "curl" / f"{name}.sh")]


LANGUAGES: dict[str, Callable[[str], Command]] = {
    "python": python,
    "javascript": javascript,
    "typescript": typescript,
    "go": go,
    "rust": rust,
    "curl": curl,
}


class Program:
    """One that runs, and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.shown = b""
        self.said = asyncio.create_task(process.stderr.read())

    async def until(self, enough: Callable[[str], bool]) -> None:
        """Reads what it prints until that is `enough`."""
        async with asyncio.timeout(60):
            while not enough(self.shown.decode()):
                assert await self._more(), f"it has ended: {self.shown.decode()}\n{await self._complaints()}"

    async def end(self) -> str:
        """All that it prints; fails with what it says when it does not end well."""
        async with asyncio.timeout(60):
            while await self._more():
                pass
            code = await self.process.wait()
        assert code == 0, f"{code}\n{self.shown.decode()}\n{await self._complaints()}"
        return self.shown.decode()

    async def _more(self) -> bytes:
        data = await self.process.stdout.read(65536)
        self.shown += data
        return data

    async def _complaints(self) -> str:
        return (await self.said).decode()


@contextlib.asynccontextmanager
async def running(command: Command, url: str, **environment: str) -> AsyncIterator[Program]:
    """The program, speaking to the gateways at `url`; nothing of it is left."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "RYZANSTEIN_URL": url, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    program = Program(process)
    try:
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await program.said


async def run(command: Command, url: str, **environment: str) -> str:
    """What the program prints, to its end."""
    async with running(command, url, **environment) as program:
        return await program.end()
