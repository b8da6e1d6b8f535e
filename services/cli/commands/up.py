"""The command `ryzanstein up`: its options. What `ryzanstein` runs before it has imported its other commands."""

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from services.cli.serve import require_packages
from services.cli.supervision.stack import StackPlan
from services.cli.supervision.up import Up
from services.cli.target import DataDir, NatsUrl, StackSettings
from services.cli.ui import console
from shared.config import load_settings
from shared.data_types import DTYPES, KV_DTYPES, WEIGHT_DTYPES, WEIGHT_FORMATS
from shared.errors import ConfigurationError
from shared.messages import ModelSpec
from shared.model_store import catalog as model_store
from shared.models import REASONING_PARSERS, TOOL_PARSERS, here

ENGINES = ("torch", "vllm", "stub")
ENGINE_KINDS = ("vllm", "sglang", "llama.cpp")

if TYPE_CHECKING:
    from shared.registry import DeclaredAdapter


def up(
    models: Annotated[list[str] | None, typer.Argument(metavar="MODEL", help="As with --model, before these.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Built-in name, hub name (of a GGUF file ORG/NAME:Q4_K_M), directory or .gguf file. May be given "
            "several times: executors start with the first and load the others beside it.",
            metavar="NAME|DIR|FILE.gguf",
            show_default=model_store.DEFAULT_MODEL,
        ),
    ] = None,
    served_model_name: Annotated[
        str,
        typer.Option(
            help="The name by which requests ask for the first --model.", metavar="NAME", show_default="its own name"
        ),
    ] = "",
    models_file: Annotated[
        str, typer.Option(help="models.yaml: further models to serve; without --model, only these.", metavar="FILE")
    ] = "",
    tp: Annotated[int, typer.Option(help="Ranks of each executor group (tensor parallelism).", min=1, max=64)] = 1,
    replicas: Annotated[int, typer.Option(help="Executor groups.", min=1)] = 1,
    gateways: Annotated[
        int | None,
        typer.Option(
            help="Gateway processes on the API's port; each needs a core of its own to add throughput.",
            min=1,
            max=64,
            show_default="1",
        ),
    ] = None,
    schedulers: Annotated[
        int | None,
        typer.Option(
            help="Scheduler processes; with 2, requests continue while one restarts.", min=1, max=16, show_default="1"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bf16 or fp32.", metavar="|".join(DTYPES))] = "auto",
    weight_dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Data type of weights; quantized while loading: {', '.join(WEIGHT_FORMATS)}.",
            metavar="|".join(WEIGHT_DTYPES),
            show_default="auto",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type of full KV blocks; bf16: uncompressed.", metavar="|".join(KV_DTYPES), show_default="auto"
        ),
    ] = None,
    weights_memory: Annotated[
        int | None,
        typer.Option(
            help="Bytes of weights in memory, of each rank on CPUs; the others are read from disk in each step.",
            min=0,
            metavar="BYTES",
            show_default="all of them",
        ),
    ] = None,
    draft_model: Annotated[
        str,
        typer.Option(
            help="A smaller model, best of the same vocabulary, or an EAGLE-3 head, which proposes tokens to the "
            "first --model; mtp: its own heads for multi-token prediction.",
            metavar="NAME|DIR|FILE.gguf|mtp",
        ),
    ] = "",
    port: Annotated[int, typer.Option(help="Port of the API; 0: the system chooses.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            help="Port of the gRPC API; 0: the system chooses.",
            min=0,
            max=65535,
            show_default="8001, or another if that is taken",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address of the API.")] = "127.0.0.1",
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
    engine: Annotated[
        str,
        typer.Option(
            help="What computes: torch, the executors' own; vllm, a vLLM that is installed; stub: tokens at a set "
            "speed, for tests of the control plane.",
            metavar="|".join(ENGINES),
        ),
    ] = "torch",
    engine_python: Annotated[
        Path | None,
        typer.Option(
            help="The Python of the environment that has vLLM, with --engine vllm.",
            dir_okay=False,
            show_default="the one that runs",
        ),
    ] = None,
    engine_args: Annotated[
        str,
        typer.Option(
            help="vLLM's own arguments, with --engine vllm, such as '--tensor-parallel-size 2'.", metavar="'...'"
        ),
    ] = "",
    engine_url: Annotated[
        str,
        typer.Option(
            help="A server that runs already and computes --model, which gives the tokenizer. With --engine-kind.",
            metavar="http://HOST:PORT",
        ),
    ] = "",
    engine_kind: Annotated[
        str, typer.Option(help="What answers at --engine-url.", metavar="vllm|sglang|llama.cpp")
    ] = "",
    engine_credentials: Annotated[
        Path | None, typer.Option(help="File with the key that this server asks for.", dir_okay=False)
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(help="Certificate chain (PEM): the API is at https:// then. With --tls-key.", dir_okay=False),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).", dir_okay=False)] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Authorities that must have signed clients' certificates (PEM).", dir_okay=False)
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls; none: tools are refused.",
            metavar="auto|none|hermes|llama3_json|...",
            show_default="auto",
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model marks its reasoning; none: it is part of the answer.",
            metavar="auto|none|think|mistral|...",
            show_default="auto",
        ),
    ] = None,
    smoke_test: Annotated[bool, typer.Option(help="Stream one answer once everything is ready.")] = True,
    proof: Annotated[bool | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start NATS and every service on this machine, and serve until Ctrl-C."""
    names = [*(models or []), *(model or [])]
    _check_choice("--dtype", dtype, DTYPES)
    _check_choice("--engine", engine, ENGINES)
    if engine_kind:
        _check_choice("--engine-kind", engine_kind, ENGINE_KINDS)
    if engine == "vllm" or engine_url:
        chosen = {"--weight-dtype": weight_dtype, "--kv-dtype": kv_dtype, "--weights-memory": weights_memory}
        more = {"--draft-model": draft_model, "--tp": tp > 1, "a second --model": len(names) > 1}
        _check_of_ring({**chosen, **more})
    _check_choice("--weight-dtype", weight_dtype, WEIGHT_DTYPES)
    _check_choice("--kv-dtype", kv_dtype, KV_DTYPES)
    for service in ("gateway",) if engine == "stub" else ("gateway", "executor"):
        require_packages(service, extra="all")
    tls = {"tls_certificate": tls_certificate, "tls_key": tls_key, "tls_client_ca": tls_client_ca}
    files = {name: str(path.resolve()) for name, path in tls.items() if path is not None}
    _check_choice("--tool-parser", tool_parser, TOOL_PARSERS)
    _check_choice("--reasoning-parser", reasoning_parser, REASONING_PARSERS)
    counts = {"gateways": gateways, "schedulers": schedulers}
    settings = load_settings(StackSettings, data_dir=data_dir, **counts, **files)
    first, further, adapters = _models(names, models_file)
    if served_model_name:
        _check_served_name(served_model_name, first, further)
    elif first and further:
        _check_own_name(first, further)
    plan = StackPlan(
        model=first,
        served_model_name=served_model_name,
        data_dir=settings.data_dir.expanduser().resolve(),
        host=host,
        port=port,
        tp=tp,
        replicas=replicas,
        dtype=dtype,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        draft_model=here(draft_model),
        weights_memory=weights_memory,
        engine=engine,
        engine_python=str(engine_python.absolute()) if engine_python else "",
        engine_args=engine_args,
        engine_url=engine_url,
        engine_kind=engine_kind,
        engine_credentials=str(engine_credentials.resolve()) if engine_credentials else "",
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        grpc_port=grpc_port,
        further=further,
        adapters=adapters,
    )

    async def run() -> int:
        smokes = _renamed(proof, smoke_test)
        return await Up(plan, settings, console(), nats_url=nats_url, smoke_test=smokes).run()

    raise typer.Exit(asyncio.run(run()))


def _check_of_ring(options: dict[str, object]) -> None:
    """Raises `ConfigurationError` for what only the executors' own rings know."""
    if given := [name for name, value in options.items() if value]:
        raise ConfigurationError(
            f"{given[0]} is for the executors' own rings; leave it out with --engine vllm and with --engine-url, and "
            "set the like in the engine's own arguments."
        )


def _models(names: list[str], file: str) -> tuple[str, list[ModelSpec], "list[DeclaredAdapter]"]:
    """The executors' own model (empty: none), those beside it, and their adapters. Raises `ConfigurationError`."""
    if not file and len(names) < 2:
        return names[0] if names else model_store.DEFAULT_MODEL, [], []
    from services.cli.declarations import read_file, spec_of
    from shared.registry import check_all

    further: list[ModelSpec] = []
    for name in names[1:]:
        spec = spec_of(name)
        if spec is None:
            raise ConfigurationError(
                f"{name!r} is not a model: there is no such directory, GGUF file or built-in name, and it is not of "
                "the form ORGANISATION/NAME or ORGANISATION/NAME:QUANTIZATION."
            )
        further.append(msgspec.structs.replace(spec, least=1))
    models, adapters = read_file(file) if file else ([], [])
    further += models
    if problems := check_all(further):
        raise ConfigurationError("\n  ".join(problems))
    return names[0] if names else "", further, adapters


def _check_served_name(name: str, model: str, further: list[ModelSpec]) -> None:
    from shared.registry import check_all

    if not model:
        raise ConfigurationError(
            "--served-model-name is for the executors' own model; give one with --model, or its name in the file."
        )
    if problems := check_all([*further, ModelSpec(name, model)]):
        raise ConfigurationError(f"--served-model-name: {problems[0]}")


def _check_own_name(model: str, further: list[ModelSpec]) -> None:
    from services.cli.declarations import spec_of

    own = spec_of(model)
    if own is not None and (twin := next((spec for spec in further if spec.name == own.name), None)):
        raise ConfigurationError(
            f"Two models are called {own.name!r}, {own.source} and {twin.source}; leave one out, rename its file, or "
            "give the first another name with --served-model-name."
        )


def _renamed(proof: bool | None, smoke_test: bool) -> bool:
    """`--proof` is the old name of `--smoke-test`, taken for one release more."""
    if proof is None:
        return smoke_test
    print("warning: --proof is called --smoke-test now.", file=sys.stderr)  # noqa: T201
    return proof


def _check_choice(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise ConfigurationError(f"{option} cannot be {value!r}; it is one of {', '.join(choices)}.")


def add_to(app: typer.Typer) -> None:
    app.command()(up)
