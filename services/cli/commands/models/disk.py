"""`ryzanstein models disk`: what lies on this machine's disk, where, and what of it `models clean` would free."""

import json
import shutil
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from services.cli.machine import existing
from services.cli.target import DataDir, LocalSettings
from services.cli.ui import console, megabytes, print_columns, say
from shared.config import load_settings
from shared.model_store.catalog import list_models
from shared.model_store.disk import ADAPTERS, bytes_of, unfinished_downloads
from shared.model_store.packed import packed_files
from shared.model_store.settings import Store
from shared.models import linked_gguf


class DiskUse(msgspec.Struct, frozen=True):
    """What lies in one place. The shape of an element of `models disk --json`."""

    what: str
    entries: int
    bytes: int
    where: str
    unneeded: int = 0  # bytes that nothing needs any more


def disk(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False, data_dir: DataDir = None
) -> None:
    """Show what models, packed weights, downloads and the local stack take on this machine's disk."""
    settings = load_settings(LocalSettings, data_dir=data_dir)
    found = disk_use(settings.store, settings.data_dir.expanduser())
    free = shutil.disk_usage(existing(settings.store.cache)).free
    if as_json:
        print(json.dumps({"free": free, "places": msgspec.to_builtins(found)}))  # noqa: T201
        return
    rows = [("what", "entries", "size", "unneeded", "where")]
    for one in found:
        unneeded = megabytes(one.unneeded) if one.unneeded else "-"
        rows.append((one.what, str(one.entries), megabytes(one.bytes), unneeded, one.where))
    print_columns(console(), rows, right=(1, 2, 3))
    say(console(), f"\n{megabytes(sum(one.bytes for one in found))} in all, {megabytes(free)} free")
    if any(one.unneeded for one in found):
        say(console(), "`ryzanstein models clean` removes what is unneeded.")


def disk_use(store: Store, data_dir: Path) -> list[DiskUse]:
    """Each place, also where nothing lies there."""
    models, packed = list_models(store.cache), packed_files(store.packed)
    unfinished = unfinished_downloads(store.cache)
    directories = [Path(one.directory) for one in models]
    lost = [bytes_of(one) for one in directories if not all(link.exists() for link in linked_gguf(one))]
    adapters = [*(store.cache / ADAPTERS).glob("[!.]*")]
    sources = {link.resolve() for one in directories for link in linked_gguf(one) if link.exists()}
    beside = [file for file in sources if not file.is_relative_to(store.cache.resolve())]
    logs, queue = data_dir / "logs", data_dir / "nats"
    return [
        DiskUse("models", len(models), sum(map(bytes_of, directories)), str(store.cache), sum(lost)),
        DiskUse(
            "GGUF files elsewhere",
            len(beside),
            sum(file.stat().st_size for file in beside),
            ", ".join(sorted({str(file.parent) for file in beside})) or "-",
        ),
        DiskUse(
            "packed weights",
            len(packed),
            sum(one.bytes for one in packed),
            str(store.packed),
            sum(one.bytes for one in packed if not one.needed),
        ),
        DiskUse("adapters", len(adapters), sum(map(bytes_of, adapters)), str(store.cache / ADAPTERS)),
        DiskUse("unfinished downloads", len(unfinished), sum(size for _, size in unfinished), str(store.cache)),
        DiskUse("logs", len([*logs.glob("*")]), bytes_of(logs), str(logs)),
        DiskUse("streams and queues", len([*queue.glob("*")]), bytes_of(queue), str(queue)),
    ]
