"""LoRA adapters that a host reads: checked against their base by a process of its own, and stored by their content.

    directory, hub name ─▶ copied ─▶ inspected ─▶ object store `adapters` ─▶ AdapterRecord

What is inspected is what is stored: a copy, which nobody changes meanwhile. The check imports PyTorch, which the
executor does not; of the stub engine, which adds nothing to anything, it is told what the files say.
"""

import asyncio
import hashlib
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.host.model_files import StoredModel
from shared.errors import InvalidRequest, ModelLoadError, ModelNotStored, reason_of
from shared.messages import AdapterRecord, PullAdapter
from shared.model_store.preparation import prepare_adapter
from shared.model_store.programs import run_module
from shared.nats.adapters import CONFIG, CONFIG_BYTES, MAX_BYTES, WEIGHTS, AdapterFiles, name_holder
from shared.nats.bus import Bus
from shared.registry import as_of_hub
from shared.tasks import TaskSet

AT_A_TIME = 2  # adapters that are being read; further ones wait

MAX_BASE = 200  # characters of the base's name that are kept


class AdapterInspection(msgspec.Struct, frozen=True):
    """What `services.executor.model.adapters` finds out of an adapter."""

    rank: int
    bytes: int
    modules: int
    digest: str


class _Config(msgspec.Struct):
    r: int


class _Base(msgspec.Struct):
    base_model_name_or_path: str | None = None


class HostAdapters:
    """Reads adapters for the cluster."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(AT_A_TIME)
        self._tasks = TaskSet("")
        # By the command: whoever asks again waits for the same.
        self._reading: dict[bytes, asyncio.Task[AdapterRecord]] = {}

    async def stop(self) -> None:
        await self._tasks.cancel()

    async def pull(self, command: PullAdapter, settings: ExecutorSettings, bus: Bus) -> AdapterRecord:
        """`settings`: those of a group of the base. Raises `RyzansteinError` with one sentence."""
        key = msgspec.msgpack.encode(command)
        task = self._reading.get(key)
        if task is None:
            task = self._reading[key] = self._tasks.spawn(self._read(command, settings, bus))
            task.add_done_callback(lambda _: self._reading.pop(key))
        return await asyncio.shield(task)

    async def _read(self, command: PullAdapter, settings: ExecutorSettings, bus: Bus) -> AdapterRecord:
        if not settings.max_adapters:
            raise InvalidRequest(f"The model {command.model} takes no adapters; set its max_adapters above 0.")
        base = StoredModel(settings)
        if not base.is_ready:
            raise ModelNotStored(
                f"The model {command.model} is not stored on this host, so no adapter can be checked against it; load "
                "or pull the model first."
            )
        async with self._turn:
            with tempfile.TemporaryDirectory(prefix="ryzanstein-adapter-") as scratch:
                copy = Path(scratch)
                source = await prepare_adapter(
                    as_of_hub(command.source), settings.store, lambda *step: None, revision=command.revision
                )
                await asyncio.to_thread(_copy, source, copy)
                if settings.engine == "stub":
                    found = await asyncio.to_thread(_as_told, copy, settings.max_adapter_rank)
                else:
                    model = await asyncio.to_thread(base.directory)
                    found = await asyncio.to_thread(inspect_adapter, copy, model, settings.max_adapter_rank, source)
                base_named = await asyncio.to_thread(_base_of, copy)
                files = AdapterFiles(bus)
                await files.open()
                await files.put(found.digest, copy, name_holder(command.name))
        return AdapterRecord(
            command.name,
            command.model,
            command.source,
            found.digest,
            found.rank,
            found.bytes,
            created=int(time.time()),
            revision=command.revision,
            base=base_named,
        )


def _copy(source: Path, target: Path) -> None:
    """The two files of an adapter. Raises `ModelLoadError`."""
    for name, limit in ((CONFIG, CONFIG_BYTES), (WEIGHTS, MAX_BYTES)):
        try:
            if (source / name).stat().st_size > limit:
                raise ModelLoadError(f"{source / name} has more than {limit} bytes; no adapter has.")
            shutil.copyfile(source / name, target / name)
        except (OSError, shutil.Error) as error:
            reason = getattr(error, "strerror", None) or reason_of(error)
            raise ModelLoadError(
                f"{source / name} cannot be read ({reason}); name the directory of an adapter as peft saves it."
            ) from None


def inspect_adapter(directory: Path, model: Path, max_rank: int, source: Path | None = None) -> AdapterInspection:
    """In a process of its own. `source`: what `directory` was copied from. Raises `ModelLoadError`, which names it."""
    if find_spec("torch") is None:  # as beside an engine that has a Python of its own
        raise ModelLoadError(
            "An adapter is checked against its base with PyTorch, which this executor's environment does not have; "
            "install it there (`pip install 'torch>=2.11'`)."
        )
    module = ["services.executor.model.conversion", "adapter", str(directory), str(model), str(max_rank)]
    try:
        result: dict[str, Any] = run_module(module, lambda *step: None, "The adapter could not be read")
    except ModelLoadError as error:
        raise ModelLoadError(error.message.replace(str(directory), str(source or directory))) from None
    return msgspec.convert(result, AdapterInspection)


def _base_of(adapter: Path) -> str:
    """The model that it was trained for, as it says; empty: it says nothing of that."""
    try:
        said = msgspec.json.decode((adapter / CONFIG).read_bytes(), type=_Base)
    except msgspec.MsgspecError:
        return ""
    return (said.base_model_name_or_path or "")[:MAX_BASE]


def _as_told(adapter: Path, max_rank: int) -> AdapterInspection:
    """Without looking at a weight. Raises `ModelLoadError`."""
    config, weights = ((adapter / name).read_bytes() for name in (CONFIG, WEIGHTS))
    try:
        rank = msgspec.json.decode(config, type=_Config).r
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{CONFIG} of the adapter is not one that peft writes ({error}).") from None
    if rank > max_rank:
        raise ModelLoadError(f"The adapter has the rank {rank}, and the executor takes {max_rank} at most.")
    return AdapterInspection(rank, len(weights), 0, hashlib.sha256(config + weights).hexdigest())
