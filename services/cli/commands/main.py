"""The command line `ryzanstein`: every command, registered, and those too small for a file of their own."""

from typing import Annotated

import typer

from services.cli.commands.adapters import adapters_app
from services.cli.commands.batch import batch_app
from services.cli.commands.chat import chat
from services.cli.commands.control import drain, log_level, undrain
from services.cli.commands.debug import debug_app
from services.cli.commands.fine_tune.command import fine_tune_app
from services.cli.commands.keys import keys_app
from services.cli.commands.models.local import models_app
from services.cli.commands.status import status
from services.cli.commands.up import up
from services.cli.serve import MODULES
from services.cli.serve import probe as probe_service
from services.cli.serve import serve as serve_service
from services.cli.sla.command import sla
from services.cli.supervision.nats_server import nats_config
from shared.process import VERSION

app = typer.Typer(
    name="ryzanstein",
    help="Distributed LLM inference on your own machines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ryzanstein {VERSION}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command()(up)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def serve(
    context: typer.Context,
    service: Annotated[str, typer.Argument(metavar="|".join(sorted(MODULES)), help="The service.")] = "",
) -> None:
    """Run one service in the foreground, as containers do (`serve SERVICE --help` lists its options)."""
    serve_service([service, *context.args])


@app.command(context_settings={"ignore_unknown_options": True})
def probe(
    service: Annotated[str, typer.Argument(metavar="|".join(sorted(MODULES)), help="The service.")] = "",
) -> None:
    """Ask the service beside this command whether it is ready, as a container's health check does."""
    raise typer.Exit(probe_service([service]))


for command in (status, drain, undrain, chat):
    app.command()(command)
app.add_typer(batch_app, name="batch")
app.add_typer(fine_tune_app, name="fine-tune")
app.add_typer(models_app, name="models")
app.add_typer(adapters_app, name="adapters")
app.add_typer(keys_app, name="keys")
app.add_typer(debug_app, name="debug")
app.command("log-level")(log_level)
app.command()(sla)
app.command("nats-config")(nats_config)
