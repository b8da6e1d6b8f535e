"""`ryzanstein adapters`: LoRA adapters of the models that a running stack or cluster serves, as the operator."""

import contextlib
import time
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from services.cli.cluster_models import ClusterModels, ModelsSnapshot, on_models
from services.cli.declarations import local_source, watch_adapters
from services.cli.ui import console, megabytes, print_columns, print_json, say
from shared.errors import ConfigurationError, UnknownModel, error_from_code
from shared.messages import ModelSpec
from shared.messages.registry import MAX_ADAPTERS, AdapterRecord, HostReply, PullAdapter, WantedAdapter
from shared.nats.adapters import AdapterRefused, read_by_first, register, unregister, want
from shared.registry import DeclaredAdapter, adapter_problems, nearest, other_base

PULL_TIMEOUT = 600.0  # seconds for a host to fetch, check and store an adapter

adapters_app = typer.Typer(
    help="LoRA adapters of the models that a running stack serves: load, unload, list, show.", no_args_is_help=True
)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name that clients use.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs: as JSON.")]


def _record(now: ModelsSnapshot, name: str) -> AdapterRecord:
    """Raises `UnknownModel`, with the nearest names."""
    if (found := now.adapters.get(name)) is not None:
        return found
    near = nearest(name, sorted(now.adapters))
    told = f"{' or '.join(near)} may be meant" if near else "`ryzanstein adapters list` shows what there is"
    raise UnknownModel(f"There is no adapter {name!r}; {told}.")


async def _pulled(models: ClusterModels, now: ModelsSnapshot, command: PullAdapter) -> AdapterRecord | None:
    """What the first host that has the base has read; None: none has. Raises what it has against it."""
    serving = {one.instance for one in now.groups_of(command.model) if one.instance}
    hosts = dict.fromkeys([*sorted(serving), *now.taking_hosts()])
    found = await read_by_first(models.bus, hosts, command, timeout=PULL_TIMEOUT)
    if isinstance(found, HostReply):
        raise error_from_code(found.code, found.error)
    return found


@adapters_app.command()
@on_models
async def load(
    models: ClusterModels,
    name: Name,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Directory of peft's files on the hosts, or hub name (ORG/NAME).")
    ],
    model: Annotated[str, typer.Option(help="Base model; optional if there is only one model.")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace one of that name; running requests finish with the old one.")
    ] = False,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of a hub name.", show_default="main")] = "",
    wait: Annotated[
        bool, typer.Option(help="If no host has the base's files yet, wait until one has read the adapter.")
    ] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for that; 0: no limit.", min=0)] = 0,
    json: AsJson = False,
) -> None:
    """Load a LoRA adapter: it is on every replica of its base from then on, and there again after any restart. Where no
    host has the files of its base yet, it is read as soon as one has."""
    given = local_source(source)

    now = await models.read()
    base = _base(now, model)
    _check_declared(now, DeclaredAdapter(name, base, given, revision), replace=replace)
    spec = now.specs.get(base) or ModelSpec(base, "")
    record = await _pulled(models, now, PullAdapter(name, base, given, spec, revision))
    with _told(name):
        if record is not None:
            _show(now, await register(models.adapters, record, replace=replace), as_json=json)
            return
        await want(models.adapters, name, WantedAdapter(base, given, revision, time.time()), "")
    if wait:
        now = await watch_adapters(models, [name], timeout, console(), quiet=json)
    else:
        now = await models.read()
    _show(now, now.adapters[name], as_json=json)


@adapters_app.command()
@on_models
async def unload(models: ClusterModels, name: Name) -> None:
    """Unload a LoRA adapter: nobody can ask for it any more, and what runs with it ends as it began."""
    _record(await models.read(), name)
    with _told(name):
        await unregister(models.adapters, name)
    say(console(), f"{name}: unloaded.")


@adapters_app.command("list")
@on_models
async def list_(
    models: ClusterModels,
    model: Annotated[str, typer.Option(help="Only those of this model.")] = "",
    json: AsJson = False,
) -> None:
    """List the LoRA adapters."""

    now = await models.read()
    base = now.resolve(model) if model else ""
    found = [one for _, one in sorted(now.adapters.items()) if base in ("", one.model)]
    if json:
        print_json([_fields(now, one) for one in found])
        return
    if not found:
        say(console(), "There are no adapters; `ryzanstein adapters load` loads one.")
        return
    rows = [_row(now, one) for one in found]
    heads = ("adapter", "model", "rank", "size", "in memory", "source")
    print_columns(console(), [heads, *rows], right=(2, 3, 4))
    _say_notes(now, found)


@adapters_app.command()
@on_models
async def show(models: ClusterModels, name: Name, json: AsJson = False) -> None:
    """Show one LoRA adapter."""
    now = await models.read()
    _show(now, _record(now, name), as_json=json)


def _base(now: ModelsSnapshot, given: str) -> str:
    if given:
        return now.resolve(given)
    if len(names := now.names()) == 1:
        return names[0]
    raise ConfigurationError(f"There are {len(names)} models here; name the adapter's base with --model.")


def _check_declared(now: ModelsSnapshot, adapter: DeclaredAdapter, *, replace: bool) -> None:
    if problems := adapter_problems(adapter, now.specs.values()):
        raise ConfigurationError("\n  ".join(problem.text for problem in problems))
    if adapter.name in now.names():
        raise ConfigurationError(f"A model is called {adapter.name!r}; give the adapter another name.")
    if (known := now.adapters.get(adapter.name)) is not None:
        if known.digest and not replace:
            raise ConfigurationError(f"There is an adapter {adapter.name!r} already; replace it with --replace.")
    elif len(now.adapters) >= MAX_ADAPTERS:
        raise ConfigurationError(f"There are {MAX_ADAPTERS:,} adapters, the most there may be; unload one first.")


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """What the registry has against a change, as a sentence."""
    try:
        yield
    except AdapterRefused as refused:
        said = {
            "exists": f"There is an adapter {name!r} already; replace it with --replace.",
            "missing": f"There is no adapter {name!r} any more.",
        }
        often = f"The adapter {name!r} was replaced too often in the last hours; wait, or use another name."
        raise ConfigurationError(said.get(refused.reason, often)) from None


def _groups_with(now: ModelsSnapshot, record: AdapterRecord) -> list[str]:
    held = now.groups.values() if record.digest else ()
    return sorted(group.group for group in held if record.digest in group.adapters)


def _fields(now: ModelsSnapshot, record: AdapterRecord) -> dict[str, object]:
    shown = msgspec.structs.asdict(record)
    del shown["retired"]
    return {**shown, "groups": _groups_with(now, record), "waits": now.adapter_waits(record)}


def _row(now: ModelsSnapshot, record: AdapterRecord) -> tuple[str, ...]:
    read = bool(record.digest)
    return (
        record.name,
        record.model,
        str(record.rank) if read else "-",
        megabytes(record.bytes) if read else "-",
        str(len(_groups_with(now, record))),
        record.source,
    )


def _show(now: ModelsSnapshot, record: AdapterRecord, *, as_json: bool) -> None:
    if as_json:
        print_json(_fields(now, record))
        return
    if record.digest:
        size, where = megabytes(record.bytes), ", ".join(_groups_with(now, record)) or "no group yet"
        say(console(), f"{record.name}: adapter of {record.model}, rank {record.rank}, {size}, from {record.source}.")
        say(console(), f"Digest {record.digest}; in memory of {where}.")
    _say_notes(now, [record])


def _say_notes(now: ModelsSnapshot, records: list[AdapterRecord]) -> None:
    """What is amiss with them."""
    for record in records:
        spec = now.specs.get(record.model)
        for note in (now.adapter_waits(record), other_base(record.base, record.model, spec)):
            if note:
                say(console(), f"{record.name}: {note}.", "yellow")


def add_to(app: typer.Typer) -> None:
    app.add_typer(adapters_app, name="adapters")
