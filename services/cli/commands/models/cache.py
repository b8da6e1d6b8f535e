"""`ryzanstein models clean`: room in this machine's model cache."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from services.cli.cluster_models import ClusterModels, with_models
from services.cli.target import DataDir, LocalSettings, NatsUrl, running_nats
from services.cli.ui import console, megabytes, print_columns, say
from shared.config import load_settings
from shared.errors import BrokerUnavailable, ConfigurationError
from shared.model_store.disk import CacheEntry, bytes_of, collect, remove_model, removing
from shared.model_store.packed import packed_files
from shared.model_store.repository import directory_name
from shared.model_store.settings import Store


def clean(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Remove this model only, as `models list --cached` names it, unless it is being served.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Remove least recently used models until the cache holds no more: 20G, 500M, 0.",
            show_default="RYZANSTEIN_MODEL_CACHE_BYTES",
        ),
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--unregistered", help="Work without a registry: keep only models that are being served.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Remove from this machine's model cache what is not needed: downloads that nobody goes on with, packed weights of
    models that are gone, and models, least recently used first, until it is as small as it should be. Models of the
    registry, and those that are being served, stay, as does what was put there by hand."""
    store = load_settings(LocalSettings).store
    if model is not None:
        _remove(model, store, dry_run=dry_run)
        return
    target = None if to is None else _bytes(to)
    named = [] if any_model else asyncio.run(registered(data_dir, nats_url))
    if named is None:
        raise ConfigurationError(
            "No stack runs here whose registry says which models are needed; start it, name its NATS with --nats-url, "
            "or give --unregistered."
        )
    with removing(store.cache):
        removed = collect(store, named, target, dry_run=dry_run) if store.cache.is_dir() else []
    if as_json:
        print(json.dumps({"removed": [_told(entry) for entry in removed], "dry_run": dry_run}))  # noqa: T201
        return
    rows = [("model", "size")]
    rows += [(entry.name + kind_of(entry), megabytes(entry.bytes)) for entry in removed]
    if removed:
        print_columns(console(), rows, right=(1,))
    freed = megabytes(sum(entry.bytes for entry in removed))
    say(console(), f"{freed} {'would be' if dry_run else 'were'} removed from {store.cache}")


def kind_of(entry: CacheEntry) -> str:
    """Beside its name, where it is no whole model."""
    if entry.packed:
        return " (packed weights)"
    return " (unfinished)" if entry.unfinished else ""


def _remove(model: str, store: Store, *, dry_run: bool) -> None:
    directory = store.cache / directory_name(model)
    if not directory.is_dir():
        raise ConfigurationError(
            f"The cache {store.cache} holds no model {model}; `ryzanstein models list --cached` shows what it holds."
        )
    packed = sum(one.bytes for one in packed_files(store.packed) if one.model == directory.resolve())
    freed = megabytes(bytes_of(directory) + packed)
    if not dry_run:
        with removing(store.cache):
            remove_model(model, "", store)
    say(console(), f"{freed} {'would be' if dry_run else 'were'} removed from {store.cache}")


async def registered(data_dir: Path | None, nats_url: str) -> list[tuple[str, str]] | None:
    """Source and revision of the models in the registry of the running stack; None: none runs, or none answers."""
    settings = running_nats(data_dir, nats_url)
    if settings is None:
        return None
    try:
        specs = (await with_models(settings, ClusterModels.read)).specs
    except BrokerUnavailable:
        if nats_url:
            raise
        return None
    return [(spec.source, spec.revision) for spec in specs.values()]


def _bytes(text: str) -> int:
    try:
        count = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        count = -1
    if count < 0:
        raise ConfigurationError(f"--to {text} is no size; give bytes, or such as 500M, 20G or 20GiB.")
    return count


def _told(entry: CacheEntry) -> dict[str, object]:
    return {
        "model": entry.name,
        "directory": str(entry.directory),
        "bytes": entry.bytes,
        "unfinished": entry.unfinished,
        "packed": entry.packed,
    }
