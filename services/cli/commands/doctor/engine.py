"""What the vLLM of another environment can make of a model: `ryzanstein doctor --engine-python PATH --model DIR`."""

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from services.cli.commands.doctor.check import Check
from services.cli.ui import megabytes
from shared.models import here, linked_gguf, pulled_name

OLDEST = (0, 12)  # as in ryzanstein_vllm's worker
_TIMEOUT = 180.0  # seconds: its import alone may take a minute
# Runs in vLLM's Python; the last line that it prints is `Found`.
_LOOK = """
import json, vllm
from vllm import ModelRegistry
from vllm.platforms import current_platform
free = []
if current_platform.device_type == "cuda":
    import torch
    free = [torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())]
found = {"version": vllm.__version__, "device": current_platform.device_type, "free": free}
print(json.dumps({**found, "known": sorted(ModelRegistry.get_supported_archs())}))
"""


class Found(msgspec.Struct, frozen=True):
    """Of vLLM in its environment."""

    version: str
    device: str
    free: list[int]  # bytes of each GPU
    known: list[str]  # architectures, as config.json names them


class _Config(msgspec.Struct, frozen=True):
    architectures: list[str] = []


def checks(python: Path, model: str, store: Path, memory: int) -> Iterable[Check]:
    """`model`: a directory, or a name among those pulled to `store`; empty: none. `memory`: free bytes of this host."""
    found, why = _look(python)
    if found is None:
        advice = f"Name the Python of an environment with vLLM, or install it there: {python} -m pip install vllm."
        yield Check("vLLM", "error", why, advice)
        return
    yield _version(found, python)
    if model:
        path = Path(here(model))
        yield from _model(found, path if path.exists() else store / pulled_name(model), model, memory)


def _look(python: Path) -> tuple[Found | None, str]:
    try:
        done = subprocess.run(  # noqa: S603  # the operator's own program
            [str(python), "-c", _LOOK], capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL
        )
        return msgspec.json.decode(_last_line(done.stdout), type=Found), ""
    except OSError as error:
        return None, f"{python} cannot be started ({error.strerror})"
    except subprocess.TimeoutExpired:
        return None, f"{python} has not imported vLLM within {_TIMEOUT:.0f} s"
    except msgspec.DecodeError:
        return None, _last_line(done.stderr)[:200] or f"exit code {done.returncode}"


def _last_line(text: str) -> str:
    return ([""] + [line.strip() for line in text.splitlines() if line.strip()])[-1]


def _version(found: Found, python: Path) -> Check:
    said = f"{found.version} on {found.device} ({python})"
    parts = [int(part) for part in found.version.split(".")[:2] if part.isdecimal()]
    if len(parts) == len(OLDEST) and tuple(parts) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Check("vLLM", "error", said, f"Install {oldest} or newer: {python} -m pip install -U vllm.")
    if not found.device:
        advice = "Look at the driver, and whether the container is given GPUs; for CPUs vLLM has a build of its own."
        return Check("vLLM", "error", f"{found.version} finds no device that it is built for ({python})", advice)
    return Check("vLLM", "ok", said)


def _model(found: Found, directory: Path, name: str, memory: int) -> Iterable[Check]:
    if directory.suffix == ".gguf" or (directory.is_dir() and linked_gguf(directory)):
        advice = "`ryzanstein models convert` makes a directory with safetensors of it."
        yield Check("model for vLLM", "error", f"{name} is a GGUF file, which vLLM does not serve here", advice)
        return
    if not (directory / "config.json").is_file():
        advice = f"`ryzanstein models pull {name}` fetches it; or name a directory with config.json."
        yield Check("model for vLLM", "error", f"{name} is not here", advice)
        return
    yield _architecture(found, directory)
    yield _memory(found.free or [memory], directory, "GPU memory" if found.free else "memory")


def _architecture(found: Found, directory: Path) -> Check:
    try:
        named = msgspec.json.decode((directory / "config.json").read_bytes(), type=_Config).architectures
    except msgspec.DecodeError as error:
        return Check("model for vLLM", "error", f"{directory}/config.json: {error}", "Fetch the model again.")
    if any(one in found.known for one in named):
        return Check("model for vLLM", "ok", ", ".join(named))
    said = ", ".join(named) or "no architecture named"
    advice = f"vLLM {found.version} has no model of its own for it: transformers' may serve it, slower; or update vLLM."
    return Check("model for vLLM", "warning", said, advice)


def _memory(free: Sequence[int], directory: Path, kind: str) -> Check:
    """Whether the weights fit, in all GPUs together."""
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    said = f"{megabytes(weights)} of weights, {megabytes(sum(free))} free"
    if not weights:
        return Check("memory for vLLM", "warning", f"{directory} has no *.safetensors", "Fetch the model again.")
    if weights >= sum(free):
        return Check("memory for vLLM", "error", f"{said} ({kind})", "Take a smaller or a quantized model.")
    if len(free) > 1 and weights >= max(free):
        count = next(count for count in range(2, len(free) + 1) if weights < count * min(free) or count == len(free))
        advice = f"One GPU does not hold it: --engine-args '--tensor-parallel-size {count}'."
        return Check("memory for vLLM", "note", f"{said} ({kind})", advice)
    return Check("memory for vLLM", "ok", f"{said} ({kind})")
