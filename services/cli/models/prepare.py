"""Getting a model ready in a process of its own, which can be ended at any time.

What fetches and converts a model (pip, the hub's threads, the converter) cannot be interrupted from within;
as a process it can, and it leaves neither a half model nor a child behind.
"""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import msgspec

from services.cli.models.catalog import ensure_model, is_ready
from services.cli.models.downloads import Progress
from shared.errors import InternalError, RyzansteinError, error_from_code
from shared.process import die_with_parent

_GRACE = 1.5


class _Step(msgspec.Struct, frozen=True, tag="step"):
    stage: str
    done: int
    total: int


class _Ready(msgspec.Struct, frozen=True, tag="ready"):
    name: str
    directory: str


class _Failed(msgspec.Struct, frozen=True, tag="failed"):
    code: str
    message: str


_line = msgspec.json.Decoder(_Step | _Ready | _Failed)


async def prepare_model(name: str, cache: Path, report: Progress) -> tuple[str, Path]:
    """What `ensure_model` returns and raises, from a process that ends when this is cancelled; without one where
    the model is there."""
    if is_ready(name, cache):
        return ensure_model(name, cache, report)
    with tempfile.TemporaryFile() as complaints:
        async with _process(name, cache, complaints) as process:
            assert process.stdout is not None
            async for line in process.stdout:
                match _line.decode(line):
                    case _Step(stage, done, total):
                        report(stage, done, total)
                    case _Ready(served, directory):
                        return served, Path(directory)
                    case _Failed(code, message):
                        raise error_from_code(code, message)
            status = await process.wait()
        complaints.seek(0)
        last = (complaints.read().decode(errors="replace").strip().splitlines() or [f"exit code {status}"])[
            -1
        ]
    raise InternalError(f"The model {name} could not be made ready ({last}); try again.")


@contextlib.asynccontextmanager
async def _process(name: str, cache: Path, errors: IO[bytes]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.cli.models.prepare",
        name,
        str(cache),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        start_new_session=True,  # Ctrl-C reaches us alone
        preexec_fn=die_with_parent(),
    )
    try:
        yield process
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM lets it clear up; whoever does not react (a download in a thread) is killed with its children."""
    with contextlib.suppress(ProcessLookupError):
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), _GRACE)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _on_terminate(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # once: what clears up now is not to be interrupted
    raise SystemExit(128 + number)


def main(name: str, cache: Path) -> int:
    """The process: a line of JSON for each step, and one for the end. The output carries nothing else."""
    signal.signal(signal.SIGTERM, _on_terminate)
    lines, sys.stdout = sys.stdout, sys.stderr

    def write(line: msgspec.Struct) -> None:
        print(msgspec.json.encode(line).decode(), file=lines, flush=True)  # read by our parent

    try:
        served, directory = ensure_model(name, cache, lambda *step: write(_Step(*step)))
    except RyzansteinError as error:
        write(_Failed(error.code, error.message))
        return 1
    write(_Ready(served, str(directory)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
