"""`ryzanstein models`: fetch, list, inspect and convert models; what a running stack serves is in `serving`."""

import asyncio
import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from services.cli.commands.models import serving
from services.cli.commands.models.cache import clean, registered
from services.cli.commands.models.disk import disk
from services.cli.commands.models.recommend import recommend
from services.cli.commands.models.tables import list_running
from services.cli.other_names import ModelsGroup
from services.cli.target import DataDir, LocalSettings, NatsUrl, running_nats
from services.cli.ui import console, megabytes, model_bars, print_columns, say
from shared.config import load_settings
from shared.errors import ConfigurationError
from shared.model_store import catalog
from shared.model_store.disk import unfinished_downloads
from shared.model_store.packed import PackedWeightsFile, packed_files
from shared.model_store.preparation import prepare_model
from shared.model_store.programs import Progress, convert_model, run_module
from shared.models import here, hub_name

models_app = typer.Typer(
    help="Models: of a running stack, and on this machine.",
    no_args_is_help=True,
    rich_markup_mode=None,
    cls=ModelsGroup,
)
models_app.command()(recommend)
models_app.command()(disk)
models_app.command()(clean)
for command in (serving.load, serving.unload, serving.show, serving.add, serving.remove):
    models_app.command()(command)
models_app.command("set")(serving.set_)
models_app.command("apply")(serving.apply_)


@models_app.command("pull")
def models_pull(
    name: Annotated[
        str, typer.Argument(help="Built-in name, hub name (ORG/NAME:Q4_K_M) or .gguf file.")
    ] = catalog.DEFAULT_MODEL,
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts", help="Have the hosts of a cluster fetch it instead of this machine; the default with --nats-url."
        ),
    ] = False,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit of a hub name.", show_default="main")] = "",
    timeout: serving.Timeout = 0,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Fetch a model and make it ready to be served: into this machine's cache, or onto the hosts of a cluster."""
    if hosts or nats_url:
        serving.pull_on_hosts(name, data_dir, nats_url, timeout)
        return
    store, screen = load_settings(LocalSettings).store, console()

    async def prepare(report: Progress) -> tuple[str, Path]:
        named = await registered(data_dir, nats_url) if store.cache_bytes else None
        return await prepare_model(here(name), store, report, revision=revision, named=named)

    with model_bars(screen) as report:
        served, directory = asyncio.run(prepare(report))
    say(screen, f"{served} is ready in {directory}")


@models_app.command("list")
def models_list(
    supported: Annotated[bool, typer.Option("--supported", help="List the served architectures instead.")] = False,
    cached: Annotated[
        bool, typer.Option("--cached", help="List the models in this machine's cache, even if a stack runs.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_yaml: Annotated[
        bool,
        typer.Option("--yaml", help="Print the registry of the running stack as a models file for `models apply`."),
    ] = False,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Show the models of the running stack: status, replicas, memory. Where none runs, those in the cache and those
    with a built-in name."""
    if supported:
        _list_supported(as_json=as_json)
        return
    running = None if cached else running_nats(data_dir, nats_url)
    if running is not None:
        list_running(running, as_json=as_json, as_yaml=as_yaml)
        return
    if as_yaml:
        raise ConfigurationError("No stack runs here, so there is no registry; start one, or give --nats-url.")
    _list_cached(as_json=as_json)


def _list_cached(*, as_json: bool) -> None:
    store = load_settings(LocalSettings).store
    local, packed = catalog.list_models(store.cache), packed_files(store.packed)
    models = [Path(model.directory).resolve() for model in local]
    of_models = [sum(file.bytes for file in packed if file.model == model) for model in models]
    others = [file for file in packed if file.model not in models]
    unfinished = unfinished_downloads(store.cache)
    if as_json:
        told = [{**msgspec.to_builtins(model), "packed": size} for model, size in zip(local, of_models, strict=True)]
        more = [{"file": str(file.path), "bytes": file.bytes, "needed": file.needed} for file in others]
        parts = [{"directory": str(place), "bytes": size} for place, size in unfinished]
        print(json.dumps({"models": told, "unfinished": parts, "packed": more}))  # noqa: T201
        return
    rows = [("model", "size", "packed", "where")]
    rows += [
        (model.name, megabytes(model.bytes), megabytes(size) if size else "-", model.directory)
        for model, size in zip(local, of_models, strict=True)
    ]
    rows += [
        (f"{_unfinished_name(place)} (unfinished)", megabytes(size), "-", str(place)) for place, size in unfinished
    ]
    rows += [(f"{file.path.name} (packed weights)", "-", megabytes(file.bytes), _model_of(file)) for file in others]
    names = {model.name for model in local}
    for built_in in catalog.BUILT_IN.values():
        if built_in.name not in names:
            rows.append((built_in.name, "-", "-", f"not pulled yet; {built_in.about}"))
    print_columns(console(), rows, right=(1, 2))


def _unfinished_name(place: Path) -> str:
    return place.name.removeprefix(".").removesuffix(".partial").replace("--", "/")


def _model_of(file: PackedWeightsFile) -> str:
    if file.needed and file.model is not None:
        return f"of {file.model}"
    return "of a model that is gone; `ryzanstein models clean` removes it"


def _list_supported(*, as_json: bool) -> None:
    found = run_module(["services.executor.model.supported"], lambda *step: None, "The architectures cannot be listed")
    if as_json:
        print(json.dumps(found))  # noqa: T201
        return
    rows = [("architecture", "model_type", "for example", "state", "shown")]
    rows += [
        (row["title"], row["model_type"], row["examples"], ", ".join(row["state"]), row["shown"])
        for row in found["served"]
    ]
    print_columns(console(), rows)
    refused = sum(len(row["model_types"]) for row in found["refused"])
    say(
        console(),
        f"{len(found['served'])} architectures are served, {refused} are refused by name (--json has the reasons).",
    )


_Name = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A directory, a .gguf file or a name in the cache; inspect: of the hub too."),
]


@models_app.command("inspect")
def models_inspect(
    model: _Name, as_json: Annotated[bool, typer.Option("--json", help="Print all facts as one JSON object.")] = False
) -> None:
    """Show a model's tensors: their formats, shapes and bytes, and what would compute with them on this CPU. Of a name
    of the hub that is not pulled, whether it is served, by its config.json alone."""
    if (path := _found(model)) is None and _is_of_hub(model):
        _look_at(model, as_json=as_json)
        return
    facts = convert_model(["inspect", path or _path(model)], lambda *step: None)
    if as_json:
        print(json.dumps(facts))  # noqa: T201
        return
    rows = [("tensor", "format", "shape", "bytes", "bits", "computed by")]
    rows += [_row(tensor) for tensor in facts["tensors"]]
    screen = console()
    print_columns(screen, rows, right=(2, 3, 4))
    formats = Counter(tensor["format"] for tensor in facts["tensors"])
    listed = ", ".join(f"{count} {form}" for form, count in formats.most_common())
    say(
        screen,
        f"{facts['architecture']}: {len(facts['tensors'])} tensors ({listed}), {facts['parameters'] / 1e6:,.1f} "
        f"million values, {megabytes(facts['bytes'])}, {facts['bits_per_weight']:.2f} bits each",
    )
    if (heads := facts["prediction_heads"])["tensors"]:
        say(
            screen,
            f"{heads['tensors']} tensors ({megabytes(heads['bytes'])}) are heads for multi-token prediction, which are "
            "left out when the model is served, unless --draft-model mtp asks for them",
        )
    if facts["refused"]:
        say(screen, facts["refused"])


def _is_of_hub(model: str) -> bool:
    repository, quantization = hub_name(model)
    return "/" in repository and not quantization and not repository.startswith((".", "/", "~"))


def _look_at(model: str, *, as_json: bool) -> None:
    from shared.model_store import hub  # takes long to import

    repository, _ = hub_name(model)
    if not hub.is_name(repository):
        raise ConfigurationError(_unknown(model))
    with tempfile.TemporaryDirectory() as directory:
        verdict = hub.look_at(repository, Path(directory), load_settings(LocalSettings).store)
    if as_json:
        print(json.dumps(msgspec.to_builtins(verdict)))  # noqa: T201
        return
    kind = verdict.architecture or "its architecture is not known"
    say(console(), f"{repository} ({kind}): {verdict.refused or 'nothing in its config.json speaks against it'}")


@models_app.command("convert")
def models_convert(
    source: _Name,
    target: Annotated[Path, typer.Argument(help="What to make: a .gguf file, or a directory.")],
    to: Annotated[str, typer.Option(help="gguf or safetensors.")],
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the weights: f32, f16, bf16; for gguf q8_0, q6_k, q5_k_m, q4_k_m, q3_k_m, q2_k and others; for "
            "safetensors int8, int4-g128, int4-g64, int4-g32."
        ),
    ] = "bf16",
    calibrate: Annotated[
        Path | None, typer.Option(help="Calibration text, such as the model will read, by which int4 codes are chosen.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Then compare logits of both, which needs memory for the model in float32.")
    ] = False,
) -> None:
    """Write a model in another format. What a stopped conversion had finished is kept for the next."""
    if to not in ("gguf", "safetensors"):
        raise ConfigurationError(f"--to {to} is not a format that can be written; give gguf or safetensors.")
    screen = console()
    command = ["convert", _path(source), str(target.expanduser()), "--to", to, "--dtype", dtype]
    if calibrate is not None:
        command += ["--calibrate", str(calibrate.expanduser())]
    with model_bars(screen) as report:
        result = convert_model([*command, *(["--check"] if check else [])], report)
    say(screen, f"{target} is ready, {megabytes(result['bytes'])}")
    if found := result["check"]:
        before, after = found["perplexity"]
        say(
            screen,
            f"{found['tokens']} tokens: the same most likely token at {found['same_top']:.1%}, logits differ by "
            f"{found['largest']:.3g} at most, perplexity {before:.4f} before and {after:.4f} after "
            f"({after / before - 1:+.2%})"
            + ("" if found["same_tokens"] else "; the tokenizers differ: of the same text they make other tokens"),
        )


def _found(model: str) -> str | None:
    return catalog.find_model(model, load_settings(LocalSettings).model_cache)


def _path(model: str) -> str:
    """Raises `ConfigurationError` where there is none."""
    if (found := _found(model)) is None:
        raise ConfigurationError(_unknown(model))
    return found


def _unknown(model: str) -> str:
    return (
        f"{model!r} is neither a directory, nor a file, nor a model in the cache; `ryzanstein models list` shows those."
    )


def _row(tensor: dict[str, Any]) -> tuple[str, str, str, str, str, str]:
    shape = " x ".join(map(str, tensor["shape"]))
    bits = f"{8 * tensor['bytes'] / max(1, math.prod(tensor['shape'])):.2f}"
    return tensor["name"], tensor["format"], shape, f"{tensor['bytes']:,}", bits, tensor["computed_by"]


def add_to(app: typer.Typer) -> None:
    app.add_typer(models_app, name="models")
