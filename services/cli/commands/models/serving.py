"""`ryzanstein models load`, `unload`, `add`, `set`, `show`, `remove` and `apply`: what a running stack serves."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from services.cli.cluster_models import ClusterModels, ModelsSnapshot, on_models, run_on_models
from services.cli.commands.models.tables import declared_fields, replicas_of, say_status, show_end, told_of, words
from services.cli.declarations import Applied, apply, local_source, plan_apply, read_file, spec_of, watch_adapters
from services.cli.ui import ModelBars, console, described_traits, megabytes, print_json, say
from shared import sparse_attention
from shared.errors import ConfigurationError, ModelLoadError, UnknownModel, error_from_code
from shared.messages.registry import ModelSpec, PullModel, RemoveModel
from shared.model_status import ModelStatus
from shared.registry import SETTINGS, read_spec

Name = Annotated[str, typer.Argument(metavar="MODEL", help="Its name in the registry, or an alias.")]
Wait = Annotated[bool, typer.Option(help="Wait until it is done.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait; 0: no limit.", min=0)]
Force = Annotated[bool, typer.Option("--force", help="End running generations at once; they fail with an error.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Source = Annotated[
    str | None,
    typer.Option(
        help="Hub name (of a GGUF file ORG/NAME:Q4_K_M), built-in name, or directory or .gguf file on the hosts.",
        show_default="the name",
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub name.", show_default="main")]
Least = Annotated[int | None, typer.Option(help="Minimum of replicas, kept at all times.", show_default="0")]
Most = Annotated[int | None, typer.Option(help="Maximum of replicas, whatever the load.", show_default="1")]
Pin = Annotated[
    bool | None, typer.Option("--pin/--no-pin", help="Never unload it for other models.", show_default="no-pin")
]
Idle = Annotated[
    str | None,
    typer.Option(
        help="Unload replicas beyond --least after this time without a request: 90s, 10m, 2h. 0: when others need the "
        "memory.",
        metavar="TIME",
        show_default="0",
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(help="Alias; may be given several times, and replaces all present aliases. '': none."),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Settings that differ from its host's own; '': the host's. May be given several times. "
        f"Keys: {', '.join(SETTINGS)}.",
    ),
]

Sparse = Annotated[
    str | None,
    typer.Option(
        "--sparse-attention",
        help="How requests attend that do not say so: on, off, or pages or window and FIELD=VALUE with commas "
        f"(window,recent=4096); '': as without. Fields: {', '.join(sparse_attention.FIELDS[1:])}.",
        metavar="CHOICE",
        show_default="off",
    ),
]


@on_models
async def add(
    models: ClusterModels,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name that clients use.")],
    source: Source = None,
    revision: Revision = None,
    least: Least = None,
    most: Most = None,
    pin: Pin = None,
    idle: Idle = None,
    alias: Alias = None,
    setting: Setting = None,
    sparse: Sparse = None,
    wait: Wait = True,
    timeout: Timeout = 0,
    json: AsJson = False,
) -> None:
    """Add a model to the registry: with --least it is loaded at once, else by the first request for it."""
    fields = _fields(source, revision, least, most, pin, idle, alias, setting, sparse)
    spec = _checked({"name": name, **fields})
    spec = msgspec.structs.replace(spec, source=local_source(spec.source), created=int(time.time()))

    since = time.time()
    await models.add(spec)
    if wait and spec.least:
        await _watched(models.wait_loaded, [name], since, timeout, quiet=json)
    show_end(await models.read(), name, as_json=json)


@on_models
async def set_(
    models: ClusterModels,
    name: Name,
    source: Source = None,
    revision: Revision = None,
    least: Least = None,
    most: Most = None,
    pin: Pin = None,
    idle: Idle = None,
    alias: Alias = None,
    setting: Setting = None,
    sparse: Sparse = None,
    json: AsJson = False,
) -> None:
    """Change a model's entry in the registry. What is not given stays as it is."""
    fields = _fields(source, revision, least, most, pin, idle, alias, setting, sparse)
    if not fields:
        raise ConfigurationError("Nothing to change; see `ryzanstein models set --help`.")
    if "source" in fields:
        fields["source"] = local_source(fields["source"])

    def made(spec: ModelSpec) -> ModelSpec:
        # A higher floor raises the roof with it.
        roof = {} if least is None or most is not None else {"most": max(spec.most, least)}
        return _checked({**fields, **roof}, spec)

    before, after = await models.change(name, made)
    found = await models.read()
    model = found.resolve(name)
    show_end(found, model, as_json=json)
    if _run_as(before) != _run_as(after) and not json and any(found.groups_of(model)):
        anew = f"`ryzanstein models unload {model}`, and the next request or `models load` brings it back with these."
        say(console(), f"Its groups keep the settings that they were loaded with: {anew}", "yellow")


def _run_as(spec: ModelSpec) -> tuple[object, ...]:
    """What its groups are loaded with."""
    return spec.source, spec.revision, spec.settings, sparse_attention.keeps_pages(spec.sparse_attention)


@on_models
async def load(
    models: ClusterModels,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Names in the registry; one that is not there yet and is a model of the hub, a built-in one, a "
            "directory or a .gguf file is added.",
        ),
    ],
    wait: Wait = True,
    timeout: Timeout = 0,
    json: AsJson = False,
) -> None:
    """Have models loaded now. One that is loaded already stays as it is."""

    since = time.time()
    wanted = [await _registered(models, name) for name in names]
    for model in wanted:
        if not (await models.read()).status(model).ready:
            await models.order(model, "load")
    if wait:
        await _watched(models.wait_loaded, wanted, since, timeout, quiet=json)
    found = await models.read()
    if json:
        print_json([told_of(found, model) for model in wanted])
        return
    for model in wanted:
        say_status(found, model)


@on_models
async def unload(
    models: ClusterModels,
    name: Name,
    force: Force = False,
    wait: Wait = True,
    timeout: Timeout = 0,
    json: AsJson = False,
) -> None:
    """Take a model out of memory; it finishes what it runs first. It stays in the registry: `load` or a request brings
    it back."""

    _raise_if_own(await models.read(), name)
    model = (await models.order(name, "unload", force=force)).name
    if wait:
        await _watched(models.wait_unloaded, model, timeout, quiet=json)
    show_end(await models.read(), model, as_json=json)


@on_models
async def show(models: ClusterModels, name: Name, json: AsJson = False) -> None:
    """Show one model: what is wanted of it, and what it is doing where."""
    found = await models.read()
    model = found.resolve(name)
    if json:
        print_json(told_of(found, model))
        return
    spec, status = found.specs.get(model), found.status(model)
    rows = [("status", words(status)), ("replicas", replicas_of(spec, status))]
    rows += [("memory", f"{megabytes(status.memory)} a replica")] if status.memory else []
    rows += [("hosts", ", ".join(status.hosts))] if status.hosts else []
    if (placement := found.placements.get(model)) and placement.reason:
        rows.append(("placement", placement.reason))
    for group in found.groups_of(model):
        load = group.load
        rows.append((f"group {group.group}", f"{group.state}, {load.running} running, {load.waiting} waiting"))
        rows += [("", line) for line in described_traits(group.traits)]
    for field, value in (declared_fields(spec) if spec else {"source": "an executor's own --model"}).items():
        rows.append((field, ", ".join(value) if isinstance(value, list) else str(value)))
    if adapters := sorted(one.name for one in found.adapters.values() if one.model == model and one.digest):
        rows.append(("adapters", ", ".join(adapters)))
    for field, value in rows:
        say(console(), f"{field:<12}  {value}")


@on_models
async def remove(
    models: ClusterModels,
    name: Name,
    files: Annotated[bool, typer.Option("--files", help="Delete its files from the hosts' disks too.")] = False,
    force: Force = False,
    wait: Wait = True,
    timeout: Timeout = 0,
    json: AsJson = False,
) -> None:
    """Take a model out of the registry, once it has finished what it runs. Its files stay, without --files."""
    if files and not wait:
        raise ConfigurationError("--files waits until the model is unloaded; leave out --no-wait.")

    now = await models.read()
    spec = now.spec(name)
    if wait:
        _raise_if_own(now, name, removed=True)
        # A pin is against being unloaded to make room, not against this.
        await models.change(spec.name, lambda one: msgspec.structs.replace(one, pinned=False))
        await models.order(spec.name, "unload", force=force)
        await _watched(models.wait_unloaded, spec.name, timeout, quiet=json)
    await models.registry.delete(spec.name)
    if files:
        await _remove_files(models, spec)
    if json:
        print_json({"model": spec.name, "removed": True, "files": files})
    else:
        say(console(), f"{spec.name} is removed{' with its files' if files else '; its files stay'}.")


@on_models
async def apply_(
    models: ClusterModels,
    file: Annotated[
        list[str], typer.Option("--file", "-f", help="models.yaml, or - for standard input; several are one.")
    ],
    prune: Annotated[
        bool, typer.Option(help="Remove models that an earlier file declared and this one does not.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and do nothing.")] = False,
    wait: Annotated[
        bool, typer.Option(help="Wait until all replicas that --least asks for are there, and all adapters are read.")
    ] = False,
    timeout: Timeout = 0,
    json: AsJson = False,
) -> None:
    """Have the registry hold what a file declares: models and their LoRA adapters. A file with errors changes nothing;
    all of them are told."""
    read = [read_file(one) for one in file]
    wanted, adapters = ([spec for one in read for spec in one.models], [one for part in read for one in part.adapters])

    since = time.time()
    if dry_run:
        applied = plan_apply(wanted, adapters, await models.read(), "file", prune=prune)[0]
    else:
        applied = await apply(models, wanted, adapters, "file", prune=prune)
    if not dry_run and wait and (loaded := [spec.name for spec in wanted if spec.least]):
        await _watched(models.wait_loaded, loaded, since, timeout, quiet=json)
    if not dry_run and wait and adapters:
        await watch_adapters(models, [one.name for one in adapters], timeout, console(), quiet=json)
    if json:
        print_json(msgspec.to_builtins(applied))
        return
    _say_applied(applied)
    if not wanted and not applied.removed:
        say(console(), "The file declares no models.")


def _say_applied(applied: Applied) -> None:
    for kind, changes in (("", applied), ("adapter, ", applied.adapters)):
        for what in ("added", "changed", "unchanged", "removed"):
            for name in getattr(changes, what):
                say(console(), f"{name}: {kind}{what}")
    if applied.warning:
        say(console(), applied.warning, "yellow")


# --- fields --------------------------------------------------------------------------------------


def _fields(
    source: str | None,
    revision: str | None,
    least: int | None,
    most: int | None,
    pinned: bool | None,
    idle: str | None,
    aliases: list[str] | None,
    settings: list[str] | None,
    sparse: str | None,
) -> dict[str, Any]:
    """What was given, as `read_spec` takes it."""
    named = {"source": source, "revision": revision, "least": least, "most": most, "pinned": pinned}
    fields: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if idle is not None:
        fields["idle"] = idle
    if aliases:
        fields["aliases"] = [alias for alias in aliases if alias]
    if settings:
        fields["settings"] = dict(map(_setting, settings))
    if sparse is not None:
        fields["sparse_attention"] = _sparse(sparse)
    return fields


def _sparse(text: str) -> bool | dict[str, Any] | None:
    try:
        return sparse_attention.parse(text)
    except sparse_attention.WrongChoice as error:
        raise ConfigurationError(f"--sparse-attention: {error}.") from None


def _setting(text: str) -> tuple[str, str | int | None]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--setting {text!r} is not KEY=VALUE, such as context_length=8192.")
    key = key.strip().replace("-", "_")
    whole = value.strip().lstrip("-").isdecimal() and key != "speculation"
    return key, int(value) if whole else value or None


def _checked(fields: dict[str, Any], base: ModelSpec | None = None) -> ModelSpec:
    spec, problems = read_spec(fields, base=base)
    if spec is None:
        raise ConfigurationError("\n  ".join(problem.text for problem in problems))
    return spec


def _raise_if_own(now: ModelsSnapshot, name: str, *, removed: bool = False) -> None:
    """Raises `ConfigurationError` where an executor was started with the model and loads none: it serves that as long
    as it runs; and of a model that is to be `removed` where one was started with it at all."""
    model = now.resolve(name)
    for group in now.groups_of(model):
        if not group.instance or f"{group.group}/".startswith(f"{group.instance}/{model}/"):
            continue
        if group.instance not in now.taking_hosts():
            raise ConfigurationError(
                f"{group.instance} was started with the model {model}, which it serves until it ends; `ryzanstein "
                f"drain {group.group}` ends it once it has finished what it runs."
            )
        if removed:
            raise ConfigurationError(
                f"{group.instance} was started with the model {model}; `ryzanstein models unload {model}` first."
            )


async def _registered(models: ClusterModels, name: str) -> str:
    """The model's name in the registry, where it is added if it can be told from its name what it is. Raises
    `UnknownModel`."""
    now = await models.read()
    try:
        model = now.resolve(name)
    except UnknownModel:
        spec = spec_of(name)
        if spec is None:
            raise
        if (known := now.specs.get(spec.name)) is not None and known.source == spec.source:
            return known.name
        await models.add(spec)
        return spec.name
    now.spec(model)
    return model


def pull_on_hosts(name: str, data_dir: Path | None, nats_url: str, timeout: float) -> None:
    """Has every host that takes models fetch one, registered or not. Raises what one of them says of it."""

    async def run(models: ClusterModels) -> None:
        now, since = await models.read(), time.time()
        try:
            spec = now.spec(name)
        except UnknownModel:
            spec = ModelSpec(name.removeprefix("hf://"), name)
        hosts = now.taking_hosts()
        if not hosts:
            raise ConfigurationError("No host takes models at the moment; see `ryzanstein status`.")
        replies = await asyncio.gather(*(models.tell(host, PullModel(spec)) for host in hosts))
        for host, reply in zip(hosts, replies, strict=True):
            if not reply.ok:
                raise error_from_code(reply.code, f"{host}: {reply.error}")
        with ModelBars(console()) as bars:
            await models.wait(
                lambda moment: _fetched(moment, spec.name, hosts, since, bars),
                timeout,
                lambda moment: None,
                f"{spec.name} could not be fetched by all hosts",
            )
        say(console(), f"{spec.name} is ready on {', '.join(hosts)}")

    run_on_models(data_dir, nats_url, run)


def _fetched(now: ModelsSnapshot, model: str, hosts: list[str], since: float, bars: ModelBars) -> bool:
    """Whether all hosts have it, or have left. Raises why one could not."""
    left = 0
    for host in hosts:
        record = now.hosts.get(host)
        said = next((one for one in record.host.models if one.model == model), None) if record else None
        if said is not None and said.state == "failed" and said.failed_at >= since:
            raise ModelLoadError(f"{host} could not fetch {model}: {said.error}")
        serves = any(group.instance == host for group in now.groups_of(model))
        gone = record is None or record.state == "gone"
        there = gone or serves or (said is not None and said.state in ("stored", "sleeping"))
        state = "ready" if there else said.state if said is not None else "waiting"
        done, total = (said.done, said.total) if said is not None else (0, 0)
        bars.update(host, f"{host}: {state}", 1.0 if there else 0.0, done, total)
        left += not there
    return not left


async def _remove_files(models: ClusterModels, spec: ModelSpec) -> None:
    """From every host that takes models. Raises `ConfigurationError` where one could not."""
    hosts = (await models.read()).taking_hosts()
    replies = await asyncio.gather(*(models.tell(host, RemoveModel(spec)) for host in hosts))
    failed = [f"{host}: {reply.error}" for host, reply in zip(hosts, replies, strict=True) if not reply.ok]
    if failed:
        raise ConfigurationError(f"{spec.name} was removed, but some of its files remain on {'; '.join(failed)}")


# --- showing -------------------------------------------------------------------------------------


async def _watched(wait: Callable[..., Awaitable[ModelsSnapshot]], *arguments: Any, quiet: bool) -> ModelsSnapshot:
    """`wait`, with a bar for each model that it waits for."""
    models = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
    with ModelBars(console(), quiet=quiet) as bars:

        def report(now: ModelsSnapshot) -> None:
            for model in models:
                status = now.status(model)
                bars.update(model, f"{model}: {_doing(now, model, status)}", status.progress, status.done, status.total)

        end = await wait(*arguments, report)
        report(end)
    return end


def _doing(now: ModelsSnapshot, model: str, status: ModelStatus) -> str:
    leaving = [group for group in now.groups_of(model) if group.state == "draining"]
    if leaving:
        return f"draining, {sum(group.load.running for group in leaving)} running"
    return status.state
