"""The commands of `ryzanstein fine-tune` (docs/fine-tuning.md)."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from services.cli.commands.fine_tune.client import Checkpoint, Event, FineTuningClient, Job, is_over, what_is_wrong
from services.cli.commands.fine_tune.export import Format
from services.cli.commands.fine_tune.export import export as export_adapter
from services.cli.commands.fine_tune.progress import JobView, steps_of
from services.cli.gateway_client import connected, metadata_of, patiently
from services.cli.target import ApiKey, AsJson, DataDir, Gateway, Url, gateway_of_stack, with_options_of
from services.cli.ui import console, local_time, print_columns, say
from shared.errors import ConfigurationError, RyzansteinError
from shared.messages.training import Optimizer, Schedule, TrainingMethod

T = TypeVar("T")

fine_tune_app = typer.Typer(
    help="Fine-tuning jobs, which train a LoRA adapter of a served model and then serve it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class JobUnfinished(RyzansteinError):
    """The job is over, and has made no model."""


Id = Annotated[str, typer.Argument(metavar="JOB", help="Its id (ftjob-...).")]
Ca = Annotated[
    str, typer.Option(envvar="RYZANSTEIN_CA", help="File of the authorities to trust (PEM), for an https:// gateway.")
]
Auto = "auto"
LOOK_EVERY = 1.0  # seconds between two looks at a job that is followed
LAST_EVENTS_WITHIN = 10.0  # seconds in which the gateway has told the events of a job that is over


def _with_jobs(
    url: str, api_key: str, ca: str, data_dir: Path | None, work: Callable[[FineTuningClient], Awaitable[T]]
) -> T:
    """What `work` returns, given the jobs of the gateway that these options name."""

    async def run() -> T:
        gateway = Gateway(url) if url else gateway_of_stack(data_dir)
        async with connected(gateway, api_key, ca) as client:
            return await work(FineTuningClient(client))

    return asyncio.run(run())


def _command(name: str) -> Callable[[Callable[..., Awaitable[None]]], None]:
    """Registers a command that is given the jobs first, and has the options that say where the gateway is."""

    def register(command: Callable[..., Awaitable[None]]) -> None:
        def run(url: Url = "", api_key: ApiKey = "", ca: Ca = "", data_dir: DataDir = None, **given: Any) -> None:
            _with_jobs(url, api_key, ca, data_dir, lambda jobs: command(jobs, **given))

        fine_tune_app.command(name)(with_options_of(command, run))

    return register


@_command("create")
async def _create(
    jobs: FineTuningClient,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="JSON lines, an example each; or the id of an uploaded file.")
    ],
    model: Annotated[str, typer.Option(help="The base: a served model.")],
    validation: Annotated[str, typer.Option(metavar="FILE", help="Validation examples.")] = "",
    method: Annotated[TrainingMethod, typer.Option(help="dpo: FILE holds pairs of answers.")] = "supervised",
    suffix: Annotated[str, typer.Option(help="Part of the new model's name, up to 64 characters.")] = "",
    seed: Annotated[int | None, typer.Option(help="The same job with the same seed makes the same adapter.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE")] = None,
    epochs: Annotated[str, typer.Option(help="Passes over all examples.")] = Auto,
    batch_size: Annotated[str, typer.Option(help="Examples of one step.")] = Auto,
    learning_rate_multiplier: Annotated[str, typer.Option(help="Multiplies 2e-4, or 5e-6 with --method dpo.")] = Auto,
    beta: Annotated[str, typer.Option(help="With --method dpo: how close to stay to the base.")] = Auto,
    rank: Annotated[int | None, typer.Option(help="Of the adapter.", show_default="16")] = None,
    alpha: Annotated[float | None, typer.Option(help="Its weight is alpha / rank.", show_default="2 * rank")] = None,
    dropout: Annotated[float | None, typer.Option(help="Of its inputs.", show_default="0")] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Linear layers that it changes, such as q_proj; several times.",
            show_default="all but the output layer",
        ),
    ] = None,
    schedule: Annotated[Schedule | None, typer.Option(help="Of the learning rate.", show_default="cosine")] = None,
    warmup_ratio: Annotated[
        float | None, typer.Option(help="Share of the steps for warm-up.", show_default="0.03")
    ] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(show_default="adamw")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of an example.", show_default="the model's context")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Truncate longer examples; without it they are an error.")
    ] = False,
    replicas: Annotated[int | None, typer.Option(help="Hosts that train it together.", show_default="1")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Follow it until it finishes.")] = False,
    json: AsJson = False,
) -> None:
    """Upload FILE and create a job; prints its id."""
    if follow and json:
        raise ConfigurationError("--follow and --json exclude each other; give one.")
    _check_finite({"--alpha": alpha, "--dropout": dropout, "--warmup-ratio": warmup_ratio})
    hyperparameters = {
        "n_epochs": _number("--epochs", epochs, int),
        "batch_size": _number("--batch-size", batch_size, int),
        "learning_rate_multiplier": _number("--learning-rate-multiplier", learning_rate_multiplier, float),
    }
    if method == "dpo":
        hyperparameters["beta"] = _number("--beta", beta, float)
    elif beta != Auto:
        raise ConfigurationError("--beta belongs to --method dpo.")
    lora = {"rank": rank, "alpha": alpha, "dropout": dropout, "target_modules": target or None}
    given: dict[str, Any] = {
        "model": model,
        "method": {"type": method, method: {"hyperparameters": hyperparameters}},
        "suffix": suffix or None,
        "seed": seed,
        "metadata": metadata_of(metadata or []),
        "lora": _without_none(lora) or None,
        "schedule": schedule,
        "warmup_ratio": warmup_ratio,
        "optimizer": optimizer,
        "max_tokens": max_tokens,
        "truncate": truncate or None,
        "replicas": replicas,
    }
    screen = None if json else console()
    given["training_file"] = await jobs.file(file, screen)
    if validation:
        given["validation_file"] = await jobs.file(validation, screen)
    job = await jobs.create(_without_none(given))
    if json:
        _print_json(job)
        return
    print(job["id"], flush=True)  # noqa: T201
    if follow:
        await _followed(jobs, job)


def _number(option: str, text: str, kind: type[int] | type[float]) -> int | float | str:
    """What `text` says; "auto" stays. Raises `ConfigurationError`."""
    if text == Auto:
        return text
    try:
        number = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigurationError(f"{option} takes {what} or auto, not {text!r}.") from None
    _check_finite({option: number})
    return number


def _check_finite(options: dict[str, float | None]) -> None:
    """Raises `ConfigurationError` for what JSON has no place for."""
    for option, value in options.items():
        if value is not None and not math.isfinite(value):
            raise ConfigurationError(f"{option} takes a finite number, not {value}.")


def _without_none(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


@_command("status")
async def _status(jobs: FineTuningClient, job: Id, json: AsJson = False) -> None:
    """Show how far a job is, what it was made with, or why it has failed."""
    found = await jobs.get(job)
    if json:
        _print_json(found)
        return
    print_columns(console(), _rows(found))


@_command("follow")
async def _follow(jobs: FineTuningClient, job: Id) -> None:
    """Follow a job until it finishes: steps, loss as a curve, tokens a second, time left. It may be left with
    Ctrl-C and followed again; a gateway that restarts meanwhile is waited for."""
    await _followed(jobs, await jobs.get(job))


async def _followed(jobs: FineTuningClient, job: Job) -> None:
    """Raises `JobUnfinished`, so that a script hears of it by the exit code."""
    name, events = job["id"], list[Event]()

    async def read() -> None:
        async for event in jobs.follow(name):
            events.append(event)

    reader = asyncio.create_task(read())
    try:
        with JobView(console()) as view:
            while not is_over(job):
                view.update(job, _taken(events), time.time())
                await asyncio.wait({reader}, timeout=LOOK_EVERY)
                if reader.done():
                    reader.result()
                    await asyncio.sleep(LOOK_EVERY)
                job = await patiently(partial(jobs.get, name))
            await asyncio.wait({reader}, timeout=LAST_EVENTS_WITHIN)
            view.update(job, _taken(events), time.time())
    except asyncio.CancelledError:
        say(console(), f"The job goes on; `ryzanstein fine-tune follow {name}` follows it again.")
        raise
    finally:
        reader.cancel()
        await asyncio.wait({reader})
    if job["status"] != "succeeded":
        reason = f": {what_is_wrong(job)}" if job["status"] == "failed" else "."
        raise JobUnfinished(f"The job {name} is {job['status']}{reason}")
    say(console(), f"{job['fine_tuned_model']} is served: ask for it by this name.")


def _taken(events: list[Event]) -> list[Event]:
    found, events[:] = list(events), []
    return found


@_command("list")
async def _list(
    jobs: FineTuningClient, limit: Annotated[int, typer.Option(min=1, max=100)] = 20, json: AsJson = False
) -> None:
    """Show the newest jobs."""
    found = await jobs.listed(limit)
    if json:
        _print_json(found)
        return
    rows = [("created", "status", "steps", "base", "job", "model")]
    for job in found:
        done, steps = steps_of(job)
        made = job["fine_tuned_model"] or ""
        state = f"{done}/{steps}" if steps else "-"
        rows.append((local_time(job["created_at"]), job["status"], state, job["model"], job["id"], made))
    print_columns(console(), rows, right=(2,))


def _action(name: str, about: str) -> None:
    async def act(jobs: FineTuningClient, job: Id, json: AsJson = False) -> None:
        changed = await jobs.act(job, name)
        if json:
            _print_json(changed)
        else:
            print_columns(console(), _rows(changed))

    act.__doc__ = about
    _command(name)(act)


_action("cancel", "Cancel a job; its checkpoints are kept.")
_action("pause", "Pause a job; its finished steps are kept.")
_action("resume", "Resume a paused job.")


@_command("checkpoints")
async def _checkpoints(jobs: FineTuningClient, job: Id, json: AsJson = False) -> None:
    """Show the models that a job has made at the ends of its epochs."""
    found = await jobs.checkpoints(job)
    if json:
        _print_json(found)
        return
    if not found:
        say(console(), f"{job} has no checkpoint yet; one is made at the end of each epoch.")
        return
    rows = [("step", "loss", "validation", "created", "model")]
    for one in found:
        metrics = one.get("metrics") or {}
        losses = _figure(metrics.get("train_loss")), _figure(metrics.get("valid_loss"))
        rows.append(
            (str(one["step_number"]), *losses, local_time(one["created_at"]), one["fine_tuned_model_checkpoint"])
        )
    print_columns(console(), rows, right=(0, 1, 2))


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@_command("events")
async def _events(
    jobs: FineTuningClient,
    job: Id,
    limit: Annotated[int, typer.Option(help="The newest ones.", min=1, max=10_000)] = 100,
    json: AsJson = False,
) -> None:
    """Show what has happened to a job, the earliest first."""
    found = await jobs.events(job, limit)
    if json:
        _print_json(found)
        return
    rows = [(local_time(one["created_at"]), one["level"], one["message"]) for one in found]
    print_columns(console(), [("time", "level", "message"), *rows])


@fine_tune_app.command("export")
def _export(
    name: Annotated[
        str, typer.Argument(metavar="JOB|MODEL", help="A job's id, or a model that one has made (ft:...).")
    ],
    output: Annotated[Path, typer.Option(help="What to make: a directory, or for gguf a .gguf file.")],
    kind: Annotated[
        Format, typer.Option("--format", help="peft: the adapter alone; the others: merged with its base.")
    ] = "peft",
    checkpoint: Annotated[
        int, typer.Option(metavar="STEP", help="Instead of the result, a checkpoint.", show_default=False, min=0)
    ] = 0,
    base: Annotated[
        str, typer.Option(help="Directory or name of the base's files.", show_default="by its name in the cache")
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(help="Data type of merged weights, as in `models convert`.", show_default="the base's, or bf16"),
    ] = "",
    url: Url = "",
    api_key: ApiKey = "",
    ca: Ca = "",
    data_dir: DataDir = None,
) -> None:
    """Write what a job has made as files: as PEFT and vLLM read adapters, or merged with its base."""
    fetch = partial(_with_jobs, url, api_key, ca, data_dir)
    export_adapter(fetch, name, kind, output.expanduser(), checkpoint, base, dtype, console())


def _rows(job: Job) -> list[tuple[str, str]]:
    """Its fields, those that say something."""
    done, steps = steps_of(job)
    rows = [("job", job["id"]), ("status", job["status"]), ("base", job["model"])]
    method = job["method"] or {}
    chosen = (method.get(method.get("type")) or {}).get("hyperparameters") or {}
    lora = job.get("lora") or {}
    settings = [f"{name} {value}" for name, value in {**chosen, **lora}.items() if value not in (None, [])]
    optional = [
        ("model", job["fine_tuned_model"]),
        ("waits", job.get("waiting_for")),
        ("error", what_is_wrong(job) if job["status"] == "failed" else ""),
        ("steps", f"{done:,} of {steps:,}" if steps else ""),
        ("executor", _executor(job.get("progress") or {})),
        ("tokens", f"{job['trained_tokens']:,}" if job["trained_tokens"] else ""),
        ("method", method.get("type")),
        ("settings", ", ".join(settings)),
        ("seed", str(job["seed"])),
        ("files", " ".join(filter(None, (job["training_file"], job["validation_file"])))),
        ("results", " ".join(job["result_files"])),
        ("created", local_time(job["created_at"])),
        ("finished", local_time(job["finished_at"]) if job["finished_at"] else ""),
        ("expected", local_time(job["estimated_finish"]) if job["estimated_finish"] else ""),
    ]
    return rows + [(name, value) for name, value in optional if value]


def _executor(progress: dict[str, Any]) -> str:
    """Who trains it, and whether others were lost on the way."""
    host, lost = progress.get("host") or "", progress.get("executors_lost")
    if not lost:
        return host
    return f"{host or '-'} ({lost} lost, resumed at step {progress['resumed_from_step']:,})"


def _print_json(found: Job | list[Job] | list[Event] | list[Checkpoint]) -> None:
    print(msgspec.json.encode(found).decode())  # noqa: T201


def add_to(app: typer.Typer) -> None:
    app.add_typer(fine_tune_app, name="fine-tune")
