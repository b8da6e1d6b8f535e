"""The command line `ryzanstein`."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from services.cli import models as model_store
from services.cli.bars import model_bars
from services.cli.batch_commands import BatchCommands
from services.cli.chat import ChatClient
from services.cli.conversation import ChatOptions, Conversation, show_answer
from services.cli.debug_commands import debug_app
from services.cli.drain import drain_group, left_of, print_groups, undrain_group
from services.cli.keys import keys_app
from services.cli.log_level import log_level
from services.cli.nats_config_command import nats_config
from services.cli.prepare import prepare_model
from services.cli.probe import probe as probe_service
from services.cli.serve import MODULES
from services.cli.serve import serve as serve_service
from services.cli.settings import LocalSettings
from services.cli.sizes import size_of
from services.cli.sla.command import sla
from services.cli.status import print_status, read_status
from services.cli.terminal import console, print_columns
from services.cli.up_command import up
from services.cli.where import DataDir, Gateway, NatsUrl, find_stack, gateway_of_stack, trust_of
from services.cli.where import nats_of_stack as _nats_of_stack
from shared.config import load_settings
from shared.errors import DeadlineExceeded
from shared.version import VERSION

app = typer.Typer(
    name="ryzanstein",
    help="Distributed LLM inference on your own machines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Models on this machine.", no_args_is_help=True, rich_markup_mode=None)


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


@app.command()
def status(
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Show services, groups and ranks: process ids, states, load, KV use."""
    settings = _nats_of_stack(data_dir, nats_url)
    stack = None if nats_url else find_stack(data_dir, starting=True)
    starting = stack is not None and not stack.gateway_url
    found = asyncio.run(read_status(settings, stack.started if stack is not None and starting else ()))
    if json:
        print(msgspec.json.encode(found.status).decode())  # noqa: T201
    else:
        screen = console()
        if starting:
            screen.print("The stack is starting.\n", style="yellow")
        print_status(found, screen)


@app.command()
def drain(
    group: Annotated[str, typer.Argument(help="The group, as `ryzanstein status` names it.")],
    wait: Annotated[bool, typer.Option(help="Wait until the group has left.")] = True,
    grace: Annotated[
        float | None,
        typer.Option(
            help="Seconds that what runs may take to finish; the rest goes on in other groups.",
            min=0,
            show_default="as the executor is set",
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; 0: for ever.", min=0)] = 0,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Take a group out of service: it accepts nothing more, finishes or hands over what runs, and leaves."""
    settings = _nats_of_stack(data_dir, nats_url)
    screen = console()
    with screen.status(f"{group}: draining") as progress:
        end = asyncio.run(
            drain_group(
                settings,
                group,
                grace=-1.0 if grace is None else grace,
                wait=wait,
                timeout=timeout,
                report=lambda record: progress.update(left_of(record)),
            )
        )
    print_groups(end.groups, screen)
    if end.left:
        screen.print(f"{group} has left.", markup=False, highlight=False)
    elif wait:
        raise DeadlineExceeded(
            f"{group} has not left within {timeout:g} s; it goes on draining. See `ryzanstein status`."
        )


@app.command()
def undrain(
    group: Annotated[str, typer.Argument(help="The group, as `ryzanstein status` names it.")],
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Have a group that is draining stay and take requests again; one that has left must be started."""
    asyncio.run(undrain_group(_nats_of_stack(data_dir, nats_url), group))
    console().print(f"{group} takes requests.", markup=False, highlight=False)


@app.command()
def chat(
    prompt: Annotated[str, typer.Argument(help="A single question; without it, a conversation.")] = "",
    model: Annotated[str, typer.Option(help="Default: the first model that is served.")] = "",
    url: Annotated[
        str, typer.Option(help="The gateway. Default: the local stack's. [env: RYZANSTEIN_URL]")
    ] = "",
    ca: Annotated[
        str,
        typer.Option(
            envvar="RYZANSTEIN_CA", help="File of the authorities to trust (PEM), for an https:// gateway."
        ),
    ] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", min=0, max=2)] = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Show answers as they are; on a terminal they are shown as Markdown."),
    ] = False,
    data_dir: DataDir = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="RYZANSTEIN_API_KEY",
            help="Where the gateway asks for one. Other users of this machine can see options: the variable is safer.",
        ),
    ] = "",
) -> None:
    """Talk to a model, streamed."""
    options = ChatOptions(max_tokens, temperature, plain)
    gateway = Gateway(url) if url else gateway_of_stack(data_dir)
    client = ChatClient(
        gateway.url,
        model=model,
        session=f"chat-{os.getpid()}-{os.urandom(4).hex()}",
        api_key=api_key,
        trust=trust_of(gateway.certificate, ca),
    )
    screen = console()
    try:
        if prompt:
            show_answer(client, screen, prompt, options)
            return
        screen.print(
            f"{client.choose_model()} at {gateway.url}; /help lists commands, /bye or Ctrl-D ends, Ctrl-C stops an "
            "answer.",
            highlight=False,
            markup=False,
        )
        Conversation(client, screen, options).run()
    finally:
        client.close()


@models_app.command("pull")
def models_pull(
    name: Annotated[
        str, typer.Argument(help="Built-in name, hub name or .gguf file.")
    ] = model_store.DEFAULT_MODEL,
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
    local = model_store.list_models(settings.model_cache.expanduser())
    stack = find_stack(None)
    if stack is not None and stack.directory and stack.directory not in [model.directory for model in local]:
        local.append(model_store.LocalModel(stack.model, stack.directory, size_of(Path(stack.directory))))
    rows = [("model", "size", "where")]
    rows += [(model.name, f"{model.bytes / 1e6:.0f} MB", model.directory) for model in local]
    names = {model.name for model in local}
    for built_in in model_store.BUILT_IN.values():
        if built_in.name not in names:
            rows.append((built_in.name, "-", f"not pulled yet; {built_in.about}"))
    print_columns(console(), rows, right=(1,))


app.add_typer(
    BatchCommands(lambda directory: gateway_of_stack(directory).url, _nats_of_stack).app(), name="batch"
)
app.add_typer(models_app, name="models")
app.add_typer(keys_app, name="keys")
app.add_typer(debug_app, name="debug")
app.command("log-level")(log_level)
app.command()(sla)
app.command("nats-config")(nats_config)
