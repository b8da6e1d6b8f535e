"""`ryzanstein serve` and `probe`: one service, as containers have it. The entry runs both before Typer is imported;
they stand here for the help, and for options before the command."""

from typing import Annotated

import typer

from services.cli import serve as services

Service = Annotated[str, typer.Argument(metavar="|".join(sorted(services.MODULES)), help="The service.")]


def serve(context: typer.Context, service: Service = "") -> None:
    """Run one service in the foreground, as containers do (`serve SERVICE --help` lists its options)."""
    services.serve([service, *context.args])


def probe(service: Service = "") -> None:
    """Ask the service beside this command whether it is ready, as a container's health check does."""
    raise typer.Exit(services.probe([service]))


def add_to(app: typer.Typer) -> None:
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(context_settings=passed_on)(serve)
    app.command(context_settings={"ignore_unknown_options": True})(probe)
