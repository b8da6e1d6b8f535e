"""The groups of commands that `ryzanstein` has, in the order of its help. A group is imported when one of its commands
is asked for, so none waits for what another needs; without its line here, it and its commands are gone.
"""

from collections import UserDict
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer

from services.cli.other_names import AliasedCommands
from services.cli.serve import packages_of
from shared.process import VERSION


class CommandGroup(NamedTuple):
    """A module that brings `commands` and their help: its `add_to(app)` adds them to a Typer application."""

    module: str
    commands: tuple[str, ...]
    extra: str = "cli"  # of our package, with which what it imports is installed


GROUPS = (
    CommandGroup("services.cli.commands.up", ("up",), extra="all"),
    CommandGroup("services.cli.commands.services", ("serve", "probe")),
    CommandGroup("services.cli.commands.status", ("status",)),
    CommandGroup("services.cli.commands.control", ("drain", "undrain")),
    CommandGroup("services.cli.commands.chat", ("chat",)),
    CommandGroup("services.cli.commands.log_level", ("log-level",)),
    CommandGroup("services.cli.sla.command", ("sla",)),
    CommandGroup("services.cli.supervision.nats_server", ("nats-config",)),
    CommandGroup("services.cli.commands.batch", ("batch",)),
    CommandGroup("services.cli.commands.fine_tune.command", ("fine-tune",)),
    CommandGroup("services.cli.commands.models.local", ("models",)),
    CommandGroup("services.cli.commands.adapters", ("adapters",)),
    CommandGroup("services.cli.commands.keys", ("keys",)),
    CommandGroup("services.cli.commands.debug", ("debug",)),
    CommandGroup("services.cli.commands.doctor.command", ("doctor",)),
    CommandGroup("services.cli.commands.launch.command", ("launch",)),
)
_PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}


class _Commands(UserDict[str, Any]):
    """Commands by name, each made when it is looked up. Raises `ConfigurationError` where its packages are missing."""

    def __init__(self, groups: Sequence[CommandGroup]) -> None:
        super().__init__({name: group for group in groups for name in group.commands})

    def __getitem__(self, name: str) -> Any:
        group: CommandGroup = self.data[name]
        app = typer.Typer(**_PLAIN)
        with packages_of(group.extra):
            import_module(group.module).add_to(app)
        return typer.main.get_group(app).commands[name]


def command_line(groups: Sequence[CommandGroup]) -> typer.Typer:
    """The command `ryzanstein` with these groups."""

    class Root(AliasedCommands):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.commands = _Commands(groups)

    made = typer.Typer(
        name="ryzanstein",
        help="Distributed LLM inference on your own machines.",
        no_args_is_help=True,
        cls=Root,
        **_PLAIN,
    )
    made.callback()(_options)
    return made


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ryzanstein {VERSION}")  # noqa: T201
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app = command_line(GROUPS)
