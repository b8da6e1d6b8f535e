"""The adapter that a job has made, as files: peft's own, or merged with its base into safetensors or GGUF."""

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from services.cli.commands.fine_tune.client import ADAPTER_FILES, FineTuningClient
from services.cli.target import LocalSettings
from services.cli.ui import megabytes, model_bars, say
from shared.config import load_settings
from shared.errors import ConfigurationError
from shared.model_store.catalog import find_model
from shared.model_store.programs import convert_model

Format = Literal["peft", "safetensors", "gguf"]
# Runs what it is given with a connection to the gateway, in a loop of its own: what merges afterwards blocks, and ends
# with Ctrl-C.
Fetch = Callable[[Callable[[FineTuningClient], Awaitable[str]]], str]


def export(
    fetch: Fetch, name: str, kind: Format, output: Path, checkpoint: int, base: str, dtype: str, screen: Console
) -> None:
    """Writes the adapter of the job or model `name` to `output`, a directory or a .gguf file that is not there yet.

    `checkpoint`: its step, 0: the one that is named, else the result. `base`: where its base lies, "": looked for by
    its name. Raises `ConfigurationError`, `ModelLoadError`, and what the gateway says.
    """
    _check(output, kind)
    if base and kind != "peft":
        _directory_of(base)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
            adapter = Path(scratch) / "adapter"
            adapter.mkdir()
            model = fetch(lambda jobs: _download(jobs, name, checkpoint, adapter))
            if kind == "peft":
                adapter.rename(output)
                say(screen, f"{output} is ready: {' and '.join(ADAPTER_FILES)}, for {model}")
                return
            found = _merge(_directory_of(base or model), adapter, output, kind, dtype, screen)
    except OSError as error:
        raise ConfigurationError(f"{output} cannot be written: {error.strerror}.") from None
    say(screen, f"{output} is ready, {megabytes(found['bytes'])}, weights of {found['dtype']}")
    if found["codes"]:
        say(
            screen,
            f"The base is kept as {found['codes']}: the adapter was added to the values that these stand for. "
            "`ryzanstein models convert` writes codes again.",
            "yellow",
        )


def _check(output: Path, kind: Format) -> None:
    if output.exists():
        raise ConfigurationError(f"{output} exists already; remove it, or give another --output.")
    if kind == "gguf" and output.suffix != ".gguf":
        raise ConfigurationError(f"--output {output} does not end in .gguf, by which such files are known; name it so.")


async def _download(jobs: FineTuningClient, name: str, checkpoint: int, directory: Path) -> str:
    """Returns the name of its base."""
    job, named = await jobs.find(name)
    for file in ADAPTER_FILES:
        await jobs.download(job["id"], file, checkpoint or named, directory / file)
    return str(job["model"])


def _directory_of(model: str) -> str:
    found = find_model(model, load_settings(LocalSettings).model_cache)
    if found is None:
        raise ConfigurationError(
            f"The base {model!r} is not in this machine's model cache, and merging needs its files; fetch it with "
            f"`ryzanstein models pull {model}`, say where it lies with --base, or export with --format peft."
        )
    return found


def _merge(base: str, adapter: Path, output: Path, kind: Format, dtype: str, screen: Console) -> dict[str, Any]:
    command = ["convert", base, str(output), "--to", kind, "--adapter", str(adapter)]
    with model_bars(screen) as report:
        return convert_model([*command, *(["--dtype", dtype] if dtype else [])], report)
