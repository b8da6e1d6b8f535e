"""Models and adapters made ready by a process of its own, for asyncio.

What fetches and converts a model (the hub's threads, pip, the converter) cannot be interrupted from within; as a
process it can be ended at any time, and it leaves neither a half model nor a child behind. What it has fetched by then
stays: the next one continues there.
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

from shared.errors import InternalError, RyzansteinError, error_from_code
from shared.model_store.catalog import ensure_adapter, ensure_model, is_ready
from shared.model_store.disk import Named
from shared.model_store.programs import ProgramOutput, Progress, last_complaint
from shared.model_store.settings import Store
from shared.process import die_with_parent

_GRACE = 1.5  # seconds from SIGTERM to SIGKILL
_LINE_LIMIT = 1 << 20


class Order(msgspec.Struct, frozen=True):
    """What the process is to make ready."""

    name: str
    store: Store
    revision: str = ""
    named: list[tuple[str, str]] | None = None
    adapter: bool = False


async def prepare_model(
    source: str, store: Store, report: Progress, *, revision: str = "", named: Named | None = None
) -> tuple[str, Path]:
    """(served name, directory) of the model that a `ModelSpec` has as `source` and `revision`: a built-in name, a
    directory, a GGUF file, or a hub name with or without a quantization. What is missing is fetched and converted by a
    process that ends when this is cancelled; where nothing is, there is none. Several may run at once: one of them
    fetches a model, in whichever process or on whichever host of a shared cache, the others wait for it.

    `report` is called in this event loop with (stage, done, total): bytes where the stage is `downloading`, over all
    files, with 0 as long as the total is not known; other stages are `waiting for another process`, `unpacking` and
    those of a conversion. `named` are source and revision of every model of the registry: only where they are given,
    and `store.cache_bytes` is set, are other models removed to make room.

    Hold what is returned with `locks.hold_model` while it is served. Raises `ConfigurationError` and `ModelLoadError`,
    one sentence each, and `InternalError` where the process breaks.
    """
    if is_ready(source, store, revision):
        return ensure_model(source, store, report, revision=revision, named=named)
    order = Order(source, store, revision, None if named is None else list(named))
    result = await _prepared(order, report)
    return result["name"], Path(result["directory"])


async def prepare_adapter(source: str, store: Store, report: Progress, *, revision: str = "") -> Path:
    """The directory of a LoRA adapter, by a directory or a hub name, as `catalog.ensure_adapter` has it; else as
    `prepare_model`."""
    order = Order(source, store, revision, adapter=True)
    return Path((await _prepared(order, report))["directory"])


async def _prepared(order: Order, report: Progress) -> dict[str, str]:
    with tempfile.TemporaryFile() as complaints:
        async with _process(order, complaints) as process:
            assert process.stdout is not None
            async for text in process.stdout:
                line = msgspec.json.decode(text, type=ProgramOutput)
                if line.error:
                    raise error_from_code(line.code, line.error)
                if line.result:
                    return line.result
                report(line.stage, line.done, line.total)
            said = last_complaint(complaints, await process.wait())
    raise InternalError(f"The model {order.name} could not be made ready ({said}); try again.")


@contextlib.asynccontextmanager
async def _process(order: Order, errors: IO[bytes]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "shared.model_store.preparation",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        limit=_LINE_LIMIT,
        start_new_session=True,  # Ctrl-C reaches us alone
        preexec_fn=die_with_parent(),
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already, and says why
            process.stdin.write(msgspec.json.encode(order, enc_hook=str))
            process.stdin.write_eof()
            await process.stdin.drain()
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


def main(order: Order) -> int:
    """The process: a line of JSON for each step, and one for the end. The output carries nothing else."""
    signal.signal(signal.SIGTERM, _on_terminate)
    lines, sys.stdout = sys.stdout, sys.stderr

    def write(line: ProgramOutput) -> None:
        print(msgspec.json.encode(line).decode(), file=lines, flush=True)  # read by our parent

    def report(stage: str, done: int, total: int) -> None:
        write(ProgramOutput(stage, done, total))

    try:
        ensure = _adapter if order.adapter else ensure_model
        served, directory = ensure(order.name, order.store, report, revision=order.revision, named=order.named)
    except RyzansteinError as error:
        write(ProgramOutput(error=error.message, code=error.code))
        return 1
    write(ProgramOutput(result={"name": served, "directory": str(directory)}))
    return 0


def _adapter(name: str, store: Store, report: Progress, *, revision: str, named: Named | None) -> tuple[str, Path]:
    return name, ensure_adapter(name, store, report, revision=revision, named=named)


if __name__ == "__main__":
    decoder = msgspec.json.Decoder(Order, dec_hook=lambda kind, text: kind(text))  # paths
    raise SystemExit(main(decoder.decode(sys.stdin.buffer.read())))
