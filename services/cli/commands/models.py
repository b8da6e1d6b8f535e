"""`ryzanstein models`: what is on this machine, and what can be fetched."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from services.cli.models import catalog
from services.cli.models.cache import size_of
from services.cli.models.prepare import prepare_model
from services.cli.settings import LocalSettings
from services.cli.target import find_stack
from services.cli.ui import console, model_bars, print_columns
from shared.config import load_settings

models_app = typer.Typer(help="Models on this machine.", no_args_is_help=True, rich_markup_mode=None)


@models_app.command("pull")
def models_pull(
    name: Annotated[
        str, typer.Argument(help="Built-in name, hub name or .gguf file.")
    ] = catalog.DEFAULT_MODEL,
) -> None:
    """Fetch a model and make it ready to be served."""
    settings = load_settings(LocalSettings)
    screen = console()
    with model_bars(screen) as report:
        served, directory = asyncio.run(prepare_model(name, settings.model_cache.expanduser(), report))
    screen.print(f"{served} is ready in {directory}", highlight=False, markup=False, soft_wrap=True)


@models_app.command("list")
def models_list() -> None:
    """Show the models in the cache, the one that the local stack serves, and those with a built-in name."""
    settings = load_settings(LocalSettings)
    local = catalog.list_models(settings.model_cache.expanduser())
    stack = find_stack(None)
    if stack is not None and stack.directory and stack.directory not in [model.directory for model in local]:
        local.append(catalog.LocalModel(stack.model, stack.directory, size_of(Path(stack.directory))))
    rows = [("model", "size", "where")]
    rows += [(model.name, f"{model.bytes / 1e6:.0f} MB", model.directory) for model in local]
    names = {model.name for model in local}
    for built_in in catalog.BUILT_IN.values():
        if built_in.name not in names:
            rows.append((built_in.name, "-", f"not pulled yet; {built_in.about}"))
    print_columns(console(), rows, right=(1,))
