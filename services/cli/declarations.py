"""Has the registry hold what a models file or a start of `ryzanstein up` declares: all of it, or nothing.

declared + what stands there ──▶ plan_apply: errors, or what is to be written ──▶ KV `registry`, `adapters`
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from rich.console import Console

from services.cli.cluster_models import ClusterModels, ModelsSnapshot
from services.cli.target import LocalSettings
from services.cli.ui import ModelBars
from shared.config import load_settings
from shared.errors import ConfigurationError
from shared.messages.registry import MAX_ADAPTERS, AdapterRecord, ModelSpec, WantedAdapter
from shared.model_store.catalog import BUILT_IN, is_ready
from shared.models import file_of, gguf_name, here
from shared.nats.adapters import AdapterRefused, unregister, want
from shared.nats.kv import KvEntry
from shared.registry import DeclaredAdapter, adapter_problems, check_all, of_hub

if TYPE_CHECKING:  # it needs YAML, which those alone import who read such a file
    from shared.models_file import Declaration

Origin = Literal["up", "file"]


class DeclarationChanges(msgspec.Struct, frozen=True):
    """Names, by what becomes of them."""

    added: list[str] = []
    changed: list[str] = []
    unchanged: list[str] = []
    removed: list[str] = []


class Applied(DeclarationChanges, frozen=True):
    """What becomes of the models, and of the adapters."""

    adapters: DeclarationChanges = DeclarationChanges()
    warning: str = ""  # what is not known about models that it pins


class Writes(NamedTuple):
    """What the registry has to be told."""

    models: list[ModelSpec]
    adapters: list[DeclaredAdapter]
    adopted: list[str]  # adapters that are as they are declared, and that somebody else had declared


def declared_adapters(now: ModelsSnapshot) -> list[DeclaredAdapter]:
    """The adapters of a registry, as a file would declare them."""
    return [_declared_adapter(record) for _, record in sorted(now.adapters.items())]


def plan_apply(
    models: list[ModelSpec], adapters: list[DeclaredAdapter], now: ModelsSnapshot, origin: Origin, *, prune: bool = True
) -> tuple[Applied, Writes]:
    """What is to be written so that the registry has these; what `origin` declared earlier and does not now is removed
    where `prune`. Pure. Raises `ConfigurationError` with all that is wrong, and `ModelDoesNotFit`; nothing is to be
    written then."""
    names = {spec.name for spec in models}
    removed = sorted(name for name, spec in now.specs.items() if prune and spec.origin == origin and name not in names)
    beside = [spec for spec in now.specs.values() if spec.name not in names and spec.name not in removed]
    changes, asked, adopted = _plan_adapters(adapters, now, origin, prune=prune)
    staying = now.adapters.keys() - set(changes.removed)
    if problems := _problems(models, adapters, beside, staying):
        raise ConfigurationError("\n  ".join(problems))
    warning = now.check_pins(models, removed)
    writes, added, changed, unchanged = list[ModelSpec](), list[str](), list[str](), list[str]()
    for spec in models:
        known = now.specs.get(spec.name)
        if known is None:
            writes.append(msgspec.structs.replace(spec, origin=origin, created=int(time.time())))
            added.append(spec.name)
            continue
        kept = {name: getattr(known, name) for name in ("action", "action_at", "force", "created")}
        gone = set(known.aliases).difference(spec.aliases)
        defaults = {name: values for name, values in known.defaults.items() if name not in gone}
        entry = msgspec.structs.replace(spec, origin=origin, defaults=defaults, **kept)
        if entry != known:
            writes.append(entry)
        (unchanged if known.declared() == spec.declared() else changed).append(spec.name)
    return Applied(added, changed, unchanged, removed, changes, warning), Writes(writes, asked, adopted)


def _plan_adapters(
    wanted: list[DeclaredAdapter], now: ModelsSnapshot, origin: Origin, *, prune: bool
) -> tuple[DeclarationChanges, list[DeclaredAdapter], list[str]]:
    """What becomes of them, those that are to be read, and those that are but were not `origin`'s."""
    names = {adapter.name for adapter in wanted}
    removed = [
        name for name, record in sorted(now.adapters.items()) if prune and record.origin == origin and name not in names
    ]
    changes = DeclarationChanges([], [], [], removed)
    asked, adopted = list[DeclaredAdapter](), list[str]()
    for adapter in wanted:
        known = now.adapters.get(adapter.name)
        same = known is not None and _declared_adapter(known) == adapter
        (changes.added if known is None else changes.unchanged if same else changes.changed).append(adapter.name)
        if known is None or not same or (known.wanted is not None and known.wanted.error):
            asked.append(adapter)  # what could not be read is tried again at once
        elif known.origin != origin:
            adopted.append(adapter.name)
    return changes, asked, adopted


def _declared_adapter(record: AdapterRecord) -> DeclaredAdapter:
    stands = record.wanted or record
    return DeclaredAdapter(record.name, stands.model, stands.source, stands.revision)


def _problems(
    models: list[ModelSpec], adapters: list[DeclaredAdapter], beside: list[ModelSpec], staying: Iterable[str]
) -> list[str]:
    """All that is wrong with what is declared: among itself, and beside what stays."""
    names = {adapter.name for adapter in adapters}
    others = set(staying) - names
    found = check_all(models, beside, others)
    for adapter in adapters:
        found += [problem.text for problem in adapter_problems(adapter, [*beside, *models])]
    twice = (name for name, count in Counter(one.name for one in adapters).items() if count > 1)
    found += [f"The adapter {name!r} is declared twice." for name in twice]
    if len(names | others) > MAX_ADAPTERS:
        found.append(f"The registry holds {MAX_ADAPTERS:,} adapters at most.")
    return found


async def apply(
    models: ClusterModels,
    wanted: list[ModelSpec],
    adapters: list[DeclaredAdapter],
    origin: Origin,
    *,
    prune: bool = True,
) -> Applied:
    """Has the registry hold these. Raises `ConfigurationError`; nothing was written then."""
    applied, writes = plan_apply(wanted, adapters, await models.read(), origin, prune=prune)
    for spec in writes.models:
        await models.registry.put(spec.name, spec)
    for one in writes.adapters:
        order = WantedAdapter(one.model, one.source, one.revision, time.time())
        await want(models.adapters, one.name, order, origin)
    for name in writes.adopted:
        await models.adapters.change(name, lambda known: _adopted(known, origin))
    for name in applied.removed:
        await models.registry.delete(name)
    for name in applied.adapters.removed:
        try:
            await unregister(models.adapters, name)
        except AdapterRefused as refused:
            if refused.reason != "missing":
                raise ConfigurationError(
                    f"The adapter {name!r} was replaced too often in the last hours; wait, and apply again."
                ) from None
    return applied


def _adopted(known: KvEntry[AdapterRecord] | None, origin: Origin) -> AdapterRecord | None:
    return None if known is None else msgspec.structs.replace(known.value, origin=origin)


async def watch_adapters(
    models: ClusterModels, names: Sequence[str], timeout: float, screen: Console, *, quiet: bool = False
) -> ModelsSnapshot:
    """Until a host has read each of these, with what each waits for. Raises as `ClusterModels.wait_adapters`."""
    with ModelBars(screen, quiet=quiet) as bars:

        def report(now: ModelsSnapshot) -> None:
            for name in names:
                record = now.adapters[name]
                if record.wanted is None:
                    bars.update(name, f"{name}: read", 1.0, 0, 0)
                else:
                    base = now.status(record.wanted.model)
                    bars.update(name, f"{name}: {now.adapter_waits(record)}", base.progress, base.done, base.total)

        end = await models.wait_adapters(names, timeout, report)
        report(end)
    return end


def read_file(path: str) -> "Declaration":
    """What a file declares. Raises `ConfigurationError` with every error."""
    from shared.models_file import MAX_BYTES, read_models_file

    try:
        if path == "-":
            return read_models_file(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input")
        with Path(path).expanduser().open("rb") as stream:
            return read_models_file(stream.read(MAX_BYTES + 1), path)
    except OSError as error:
        raise ConfigurationError(f"The models file {path} cannot be read ({error.strerror}); check the path.") from None


def local_source(source: str) -> str:
    """A source that is a path of this machine as every process of it understands it; others as they are."""
    return source if of_hub(source) else here(source)


def spec_of(name: str) -> ModelSpec | None:
    """A model as it is called by its source: hub name, built-in name, path, or a name in the cache; None: none."""
    path = Path(name).expanduser()
    built_in = next((known for known in BUILT_IN if known.lower() == name.lower()), "")
    if built_in:
        return ModelSpec(built_in, built_in, created=int(time.time()))
    if path.exists() and (path.is_dir() or path.suffix == ".gguf"):
        source = Path(file_of(here(name)))
        served = source.resolve().name if source.is_dir() else gguf_name(source)
        return ModelSpec(served, str(source), created=int(time.time()))
    if of_hub(name) or is_ready(name, load_settings(LocalSettings).store):
        return ModelSpec(name.removeprefix("hf://"), name, created=int(time.time()))
    return None
