"""Our server against its peers: `python -m benchmarks.peers --help`, and docs/performance.md.

Installs each peer in an environment of its own, starts one server at a time, puts the same load on each, and
prints one table.
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from platformdirs import user_cache_path

from benchmarks.errors import BenchError
from benchmarks.harness import JsonFile, Markdown, Rounds, Threads, about, progress_bars, publish
from benchmarks.harness import run as run_program
from benchmarks.peers.catalog import DEFAULT, PEERS, choose_peers
from benchmarks.peers.results import Comparison, Setting, compare, markdown, parts
from benchmarks.peers.rounds import Contest, Run
from benchmarks.random_model import SHAPES, TOKENIZER, shape_of, write_servable
from benchmarks.serve.__main__ import named_workloads
from benchmarks.serve.runner import conversation
from benchmarks.serve.workloads import Vocabulary, calibrate
from services.gateway.tokenizer.tokenizer import ModelTokenizer
from shared.errors import RyzansteinError

_MODEL_FILES = ("config.json", "tokenizer.json")


def local_vocabulary(model: Path) -> Vocabulary:
    """How to build prompts for this model, by its own files: so all peers get the same, token for token.

    Raises BenchError for a directory without a usable tokenizer and chat template.
    """
    files = {name: (model / name).read_bytes() for name in TOKENIZER if (model / name).exists()}
    try:
        tokenizer = ModelTokenizer(files)

        async def measure(contents: Sequence[str]) -> int:
            return len(await tokenizer.encode_rendered(await tokenizer.render_chat(conversation(contents))))

        return asyncio.run(calibrate(measure))
    except RyzansteinError as error:
        raise BenchError(f"Prompts for {model} cannot be built: {error}") from None


def _check_model(model: Path) -> Path:
    if missing := [name for name in _MODEL_FILES if not (model / name).is_file()]:
        raise BenchError(
            f"{model} holds no {missing[0]}: give a model directory; `ryzanstein models list` shows where one is."
        )
    return model.expanduser().resolve()


def random_model(text: str, tokenizer: Path, work: Path) -> Path:
    """The directory of a random model, written where it is not there yet."""
    try:
        shape = shape_of(text)
    except ValueError as error:
        raise BenchError(f"--random {error}.") from None
    directory = work / "models" / f"random-{text.replace(',', '-')}"
    if not directory.exists():
        write_servable(directory, shape, tokenizer)
    return directory


def _compare(contest: Contest, run: Run) -> Comparison:
    setting = Setting(
        **about(), model=contest.model.name, threads=contest.threads, rounds=contest.rounds, seed=contest.seed
    )
    return compare(setting, list(run.results.values()))


def _run(contest: Contest, *, prepare_only: bool) -> tuple[Comparison, bool]:
    """The comparison, and whether it was interrupted; what was measured until then is in it."""
    with progress_bars() as progress:
        run = Run(contest, progress, lambda text: progress.console.print(text, markup=False, highlight=False))
        try:
            run.prepare()
            if not prepare_only:
                run.run()
        except KeyboardInterrupt:
            return _compare(contest, run), True
    return _compare(contest, run), False


def main(
    model: Annotated[Path, typer.Option(help="A Llama model's directory, with safetensors and tokenizer.")],
    random: Annotated[
        str,
        typer.Option(
            help="Instead, with the tokenizer of --model: a Llama of random weights in this shape, as hidden,heads,"
            f"kv_heads,inner,layers,vocabulary, or one of {', '.join(SHAPES)}; kept in the work directory."
        ),
    ] = "",
    peers: Annotated[str, typer.Option(help=f"With commas, of {', '.join(PEERS)}.")] = ",".join(DEFAULT),
    workloads: Annotated[str, typer.Option(help="With commas, of W1, W2, W3, W4, W4s.")] = "W1,W2,W3,W4",
    rounds: Rounds = 3,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of each workload.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Clients at once in each workload.")] = None,
    threads: Threads = 2,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Environments, converted weights and logs. Default: in the user's cache directory."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the prompts. Default: random.")] = None,
    prepare_only: Annotated[bool, typer.Option(help="Install the peers and measure nothing.")] = False,
    json: JsonFile = None,
    as_markdown: Markdown = False,
) -> None:
    """Measure our server and its peers side by side: same model, load and number of threads.

    Exits with 1 if a peer could not be measured or a request failed.
    """
    # An end by SIGTERM is one by Ctrl-C, in the background too, where shells have SIGINT ignored: no server may
    # be left.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    work = (work_dir or user_cache_path("ryzanstein") / "peers").expanduser().resolve()
    directory = _check_model(model)
    if random:
        directory = random_model(random, directory, work)
    wanted = named_workloads([name.strip() for name in workloads.split(",") if name.strip()])
    contest = Contest(
        model=directory,
        peers=choose_peers(peers),
        workloads=[each.resized(requests=requests, clients=clients) for each in wanted],
        rounds=rounds,
        threads=threads,
        seed=secrets.randbits(32) if seed is None else seed,
        work=work,
        vocabulary=local_vocabulary(directory),
    )
    work.mkdir(parents=True, exist_ok=True)
    comparison, interrupted = _run(contest, prepare_only=prepare_only)
    publish(comparison, *([markdown(comparison)] if as_markdown else parts(comparison)), json=json)
    if interrupted:
        typer.echo("interrupted: the figures are of what was measured until then.", err=True)
        raise typer.Exit(130)
    raise typer.Exit(_exit_code(comparison))


def _exit_code(comparison: Comparison) -> int:
    failed = any(each.errors for medians in comparison.medians.values() for each in medians.values())
    left_out = any(peer.left_out is not None for peer in comparison.peers)
    return 1 if failed or left_out else os.EX_OK


if __name__ == "__main__":
    run_program(main)
