"""What commands of Ollama, vLLM, docker compose and others are called here: whoever types one of theirs is told."""

from typing import Any, Final

from typer.core import TyperGroup

_CONVERT: Final = "`ryzanstein models convert` writes a model in another format"
_LIST: Final = "`ryzanstein models list` shows models, with --cached those on this machine"
_PULL: Final = "`ryzanstein models pull` fetches a model"
_REMOVE: Final = (
    "`ryzanstein models remove` takes a model out of a running stack, `ryzanstein models clean` files off this machine"
)
COMMANDS: Final = {
    "convert": _CONVERT,
    "download": _PULL,
    "down": "Ctrl-C ends `ryzanstein up`",
    "help": "`ryzanstein --help` lists the commands",
    "list": _LIST,
    "logs": "`ryzanstein up` says where its logs are",
    "ls": _LIST,
    "ps": "`ryzanstein status` shows what runs",
    "pull": _PULL,
    "quantize": _CONVERT,
    "rm": _REMOVE,
    "run": "`ryzanstein up` serves a model, `ryzanstein chat` talks to it",
    "show": "`ryzanstein models show` shows a model",
    "start": "`ryzanstein up` starts everything",
    "stop": "Ctrl-C ends `ryzanstein up`, `ryzanstein models unload` takes a model out of memory",
    "version": "`ryzanstein --version` shows it",
}
MODELS: Final = {"delete": _REMOVE, "download": _PULL, "gc": _REMOVE, "quantize": _CONVERT, "rm": _REMOVE}


class AliasedCommands(TyperGroup):
    """Commands; `others` are names that other programs have for some."""

    others: dict[str, str] = COMMANDS

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name in self.others and name not in self.commands:
            ctx.fail(f"There is no command {name!r}: {self.others[name]}.")
        return super().resolve_command(ctx, args)


class ModelsGroup(AliasedCommands):
    others = MODELS
