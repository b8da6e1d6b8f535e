"""LoRA adapters for the stub engine: files that stand for some, and what it writes with them."""

import hashlib
from pathlib import Path

from shared.messages.registry import AdapterRecord
from shared.nats import subjects
from shared.nats.adapters import CONFIG, WEIGHTS, AdapterFiles
from shared.nats.bus import Bus
from shared.nats.kv import Bucket


def make_adapter(directory: Path, number: int, rank: int = 8) -> str:
    """Writes the files of the adapter of that number; returns its digest."""
    directory.mkdir(parents=True, exist_ok=True)
    config, weights = f'{{"r": {rank}}}'.encode(), number.to_bytes(4, "little") * 100
    (directory / CONFIG).write_bytes(config)
    (directory / WEIGHTS).write_bytes(weights)
    return hashlib.sha256(config + weights).hexdigest()


async def store_adapter(bus: Bus, directory: Path, number: int, rank: int = 8, holder: str = "test") -> str:
    """Puts it into the object store, as an executor does that was told to read it; returns its digest."""
    digest = make_adapter(directory / str(number), number, rank)
    files = AdapterFiles(bus)
    await files.open()
    await files.put(digest, directory / str(number), holder)
    return digest


async def register(bus: Bus, name: str, model: str, digest: str, **fields: object) -> AdapterRecord:
    """As a gateway does then."""
    record = AdapterRecord(name, model, f"/adapters/{name}", digest, 8, 400, 1_700_000_000, **fields)  # type: ignore[arg-type]
    bucket = await Bucket.open(bus, subjects.ADAPTERS_BUCKET, AdapterRecord)
    await bucket.put(name, record)
    return record
