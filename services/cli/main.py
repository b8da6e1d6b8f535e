"""The command line `ryzanstein`."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.prompt import Prompt
from rich.table import Table

from services.cli import models as model_store
from services.cli.bars import model_bars
from services.cli.chat import ChatClient
from services.cli.run_file import RunFile, read_run_file
from services.cli.settings import LocalSettings
from services.cli.stack import MODULES, existing_nats
from services.cli.status import print_status, read_status
from services.cli.up import Up, UpOptions
from shared.config import CommonSettings, load_settings
from shared.errors import ConfigurationError, RyzansteinError
from shared.telemetry import configure_logging

app = typer.Typer(
    name="ryzanstein",
    help="Distributed LLM inference on your own machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Models on this machine.", no_args_is_help=True)
app.add_typer(models_app, name="models")

DataDir = Annotated[
    Path | None,
    typer.Option(help="Where the stack keeps its NATS store, logs and run file. [env: RYZANSTEIN_DATA_DIR]"),
]
NatsUrl = Annotated[str, typer.Option(help="An existing NATS server (nats://[user:password@]host:port).")]


@app.command()
def up(
    model: Annotated[
        str,
        typer.Option(help="Built-in name, hub name, directory or .gguf file.", metavar="NAME|DIR|FILE.gguf"),
    ] = model_store.DEFAULT_MODEL,
    tp: Annotated[int, typer.Option(help="Ranks of each executor group (tensor parallelism).", min=1)] = 1,
    replicas: Annotated[int, typer.Option(help="Executor groups.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="auto, bf16 or fp32.", metavar="auto|bf16|fp32")] = "auto",
    port: Annotated[
        int, typer.Option(help="Port of the API; 0: the system chooses.", min=0, max=65535)
    ] = 8000,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
    engine: Annotated[
        str, typer.Option(help="torch, or stub: tokens at a set speed, for tests of the control plane.")
    ] = "torch",
    proof: Annotated[bool, typer.Option(help="Stream one answer once everything is ready.")] = True,
) -> None:
    """Start NATS and every service on this machine, and serve until Ctrl-C."""
    _check_choice("--dtype", dtype, ("auto", "bf16", "fp32"))
    _check_choice("--engine", engine, ("torch", "stub"))
    settings = load_settings(LocalSettings, data_dir=data_dir)
    options = UpOptions(
        model=model,
        data_dir=settings.data_dir.expanduser().resolve(),
        model_cache=settings.model_cache.expanduser(),
        host=host,
        port=port,
        tp=tp,
        replicas=replicas,
        dtype=dtype,
        engine=engine,
        nats_url=nats_url,
        proof=proof,
    )

    async def run() -> int:
        return await Up(options, settings, Console()).run()

    raise typer.Exit(asyncio.run(run()))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def serve(
    context: typer.Context,
    service: Annotated[str, typer.Argument(metavar="|".join(sorted(MODULES)), help="The service.")] = "",
) -> None:
    """Run one service in the foreground, as containers do (`serve SERVICE --help` lists its options)."""
    if service in ("", "--help", "-h"):
        names = "|".join(sorted(MODULES))
        print(f"usage: ryzanstein serve {names} [options]\n")  # noqa: T201  # the terminal is the interface here
        print("`ryzanstein serve SERVICE --help` lists a service's options.")  # noqa: T201
        raise typer.Exit(0)
    _check_choice("The service", service, tuple(sorted(MODULES)))
    os.execv(sys.executable, [sys.executable, "-m", MODULES[service], *context.args])  # noqa: S606


@app.command()
def status(
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Show services, groups and ranks: process ids, states, load, KV use."""
    settings = _nats_of_stack(data_dir, nats_url)
    found = asyncio.run(read_status(settings))
    if json:
        print(msgspec.json.encode(found).decode())  # noqa: T201
    else:
        print_status(found, Console())


@app.command()
def chat(
    prompt: Annotated[str, typer.Argument(help="A single question; without it, a conversation.")] = "",
    model: Annotated[str, typer.Option(help="Default: the first model that is served.")] = "",
    url: Annotated[str, typer.Option(help="The gateway. Default: the local stack's.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", min=1)] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", min=0, max=2)] = None,
    data_dir: DataDir = None,
) -> None:
    """Talk to a model, streamed."""
    if not url:
        stack = _find_stack(data_dir)
        url = stack.gateway_url if stack else "http://127.0.0.1:8000"
    client = ChatClient(url, model=model, session=f"chat-{os.getpid()}-{os.urandom(4).hex()}")
    console = Console()
    try:
        if prompt:
            _answer(client, console, prompt, max_tokens, temperature)
            return
        console.print(
            f"{client.choose_model()} at {url}; Ctrl-D ends, Ctrl-C stops an answer.", highlight=False
        )
        _converse(client, console, max_tokens, temperature)
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
    console = Console()
    with model_bars(console) as report:
        served, directory = model_store.ensure_model(name, settings.model_cache.expanduser(), report)
    console.print(f"{served} is ready in {directory}", highlight=False)


@models_app.command("list")
def models_list() -> None:
    """Show the models in the cache, and those that can be pulled by a built-in name."""
    settings = load_settings(LocalSettings)
    local = model_store.list_models(settings.model_cache.expanduser())
    table = Table("model", "size", "where")
    for model in local:
        table.add_row(model.name, f"{model.bytes / 1e6:.0f} MB", model.directory)
    names = {model.name for model in local}
    for built_in in model_store.BUILT_IN.values():
        if built_in.name not in names:
            table.add_row(built_in.name, "-", f"not pulled yet; {built_in.about}")
    Console().print(table)


def _converse(
    client: ChatClient, console: Console, max_tokens: int | None, temperature: float | None
) -> None:
    while True:
        try:
            prompt = Prompt.ask("[bold]>[/]", console=console, show_default=False)
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if not prompt.strip():
            continue
        try:
            _answer(client, console, prompt, max_tokens, temperature)
        except KeyboardInterrupt:
            console.print(" ...")
        except RyzansteinError as error:
            console.print(f"error: {error}", style="red", markup=False)


def _answer(
    client: ChatClient, console: Console, prompt: str, max_tokens: int | None, temperature: float | None
) -> None:
    for text in client.ask(prompt, max_tokens=max_tokens, temperature=temperature):
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()


def _find_stack(data_dir: Path | None) -> RunFile | None:
    settings = load_settings(LocalSettings, data_dir=data_dir)
    return read_run_file(settings.data_dir.expanduser())


def _nats_of_stack(data_dir: Path | None, nats_url: str) -> CommonSettings:
    """The NATS that was named, else the local stack's, else what the environment says."""
    environment = load_settings(CommonSettings, nats_connect_timeout=5.0)
    if nats_url:
        return existing_nats(environment, nats_url)
    stack = _find_stack(data_dir)
    if stack is not None:
        return load_settings(
            CommonSettings,
            nats_url=stack.nats_url,
            nats_user=stack.nats_user,
            nats_password=stack.nats_password,
            nats_connect_timeout=5.0,
        )
    if "RYZANSTEIN_NATS_URL" in os.environ:
        return environment
    directory = load_settings(LocalSettings, data_dir=data_dir).data_dir
    raise ConfigurationError(
        f"No stack runs on the data directory {directory}; start one with `ryzanstein up`, or name its NATS "
        "with --nats-url."
    )


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{option} cannot be {value!r}; it is one of {', '.join(choices)}.")


def main() -> None:
    """Entry point: an expected error is one sentence on standard error and exit code 1."""
    configure_logging("cli", "cli", level="error", fmt="console")
    try:
        app()
    except RyzansteinError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
