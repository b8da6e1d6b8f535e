"""Performance regressions by ratios of one run: `python -m benchmarks.regressions --help`, `make perf`."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks.errors import BenchError
from benchmarks.harness import Sheet, machine, one_of, run, show, today
from benchmarks.regressions.measures import (
    BETTER,
    Finding,
    Ratio,
    Recorded,
    Rounds,
    compare,
    engine,
    left_out,
    ring,
    served,
    services,
)

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks/recorded/ratios.json"
MODEL = Path("~/.cache/ryzanstein/models/SmolLM2-135M-Instruct")


def _kernels(model: Path, rounds: int, effort: int) -> Rounds:
    # It brings torch, which the process that starts others has no use for.
    from benchmarks.regressions.kernels import kernels

    return kernels(model, rounds, effort)


FAMILIES: dict[str, Callable[[Path, int, int], Rounds]] = {
    "engine": engine,
    "kernels": _kernels,
    "ring": ring,
    "served": served,
    "services": services,
}
REGRESSION = 2  # exit code
# Times that all is measured for a record: one process differs from the next by more than its rounds do among
# themselves (where its memory lies, which cores it got), and that is noise as well.
RECORDED_RUNS = 3
TIME_LIMIT = 300.0  # seconds for a family, on a machine that is slow: only so that nothing hangs for ever


def measure(family: str, model: Path, rounds: int, effort: int) -> Rounds:
    """A family's ratios, from a process of its own: what one has loaded and set does not trouble the next.

    Raises BenchError.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "rounds.json")
        command = [sys.executable, "-m", "benchmarks.regressions", "--family", family, "--json", str(result)]
        options = ["--model", str(model), "--rounds", str(rounds), "--effort", str(effort)]
        try:
            done = subprocess.run(
                [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            raise BenchError(f"Measuring {family} took longer than {TIME_LIMIT:g} s.") from None
        if done.returncode:
            raise BenchError(f"Measuring {family} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return msgspec.json.decode(result.read_bytes(), type=Rounds)


def measure_all(families: Sequence[str], model: Path, rounds: int, effort: int, screen: Console) -> Rounds:
    found: Rounds = {}
    for family in families:
        began = time.monotonic()
        with screen.status(f"measuring: {family}"):
            found |= measure(family, model, rounds, effort)
        screen.print(f"{family}: {time.monotonic() - began:.0f} s", style="dim")
    return found


def pooled(measure_once: Callable[[], Rounds], runs: int) -> Rounds:
    """All rounds of `runs` measurements together."""
    found: Rounds = {}
    for _ in range(runs):
        for name, rounds in measure_once().items():
            found[name] = found.get(name, []) + rounds
    return found


def judge(found: Rounds, recorded: Recorded | None) -> list[Finding]:
    now = {name: Ratio.of(rounds) for name, rounds in found.items()}
    return compare(now, recorded.ratios if recorded else {}, BETTER)


def once_more(
    findings: Sequence[Finding], found: Rounds, again: Callable[[], Rounds], recorded: Recorded | None
) -> list[Finding]:
    """A ratio that looks worse is measured once more, and all its rounds are judged together: a regression
    stays, what disturbed a minute does not."""
    if not any(finding.verdict == "worse" for finding in findings):
        return list(findings)
    more = again()
    worse = {finding.name for finding in findings if finding.verdict == "worse"}
    whole = {name: rounds + (more.get(name, []) if name in worse else []) for name, rounds in found.items()}
    return judge(whole, recorded)


def sheet(findings: Sequence[Finding]) -> Sheet:
    rows = []
    for one in findings:
        before = "-" if one.before is None else f"{one.before.median:.3f} ±{one.before.error:.3f}"
        limit = "-" if one.limit is None else f"{one.limit:.3f}"
        now = f"{one.now.median:.3f} ±{one.now.error:.3f}"
        rows.append((f"{one.name} ({BETTER[one.name]} is better)", now, before, limit, one.verdict))
    styles = [{"worse": "bold red", "better": "green"}.get(one.verdict) for one in findings]
    return Sheet(("ratio", "now", "recorded", "limit", ""), rows, styles=styles)


def write(found: Rounds, path: Path) -> None:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607  # git is where PATH has it
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    ).stdout.strip()
    ratios = {name: Ratio.of(rounds) for name, rounds in found.items()}
    recorded = Recorded(commit or "unknown", today(), machine(), ratios)
    others = [one for one in _read_all(path) if not one.is_of(recorded.machine)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(msgspec.to_builtins([*others, recorded]), indent=2) + "\n")


def read(path: Path) -> Recorded | None:
    """What was recorded on a machine of this kind, or else on the first. None where nothing was. Raises BenchError."""
    records = _read_all(path)
    return next((one for one in records if one.is_of(machine())), records[0] if records else None)


def _read_all(path: Path) -> list[Recorded]:
    """Of each kind of machine."""
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Recorded])
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} has no recorded ratios ({error}); make it anew with --record.") from None


def main(
    model: Annotated[Path, typer.Option(help="A model directory.")] = MODEL,
    rounds: Annotated[int, typer.Option(help="Turns of each pair.", min=3)] = 7,
    effort: Annotated[int, typer.Option(help="Work of a turn.", min=1)] = 2,
    only: Annotated[str, typer.Option(help=f"Some of {', '.join(FAMILIES)}, with commas.")] = "",
    record: Annotated[
        bool, typer.Option("--record", help="Write the ratios of this kind of machine instead of comparing.")
    ] = False,
    against: Annotated[Path, typer.Option(help="What to compare with.")] = RECORDED,
    other_machines: Annotated[
        bool, typer.Option(help="Fail too where the ratios were recorded on another kind of machine.")
    ] = False,
    family: Annotated[str, typer.Option(hidden=True)] = "",
    json_file: Annotated[Path | None, typer.Option("--json", hidden=True)] = None,
) -> None:
    """Measure ratios and compare them with recorded ones; exit code 2 where one is worse.

    To compare a change with its base on whatever machine: --record --against FILE in a checkout of the base, then
    --against FILE in the changed one, on the same machine.
    """
    model, screen = model.expanduser(), Console(width=140)
    if family:
        assert json_file is not None
        json_file.write_bytes(msgspec.json.encode(FAMILIES[family](model, rounds, effort)))
        return
    families = only.split(",") if only else list(FAMILIES)
    one_of("--only", families, FAMILIES)
    if not (model / "config.json").is_file():
        raise BenchError(
            f"There is no model in {model}; fetch it with `ryzanstein models pull`, or name one with --model."
        )
    recorded = None if record else read(against)
    again = partial(measure_all, families, model, rounds, effort, screen)
    found = pooled(again, RECORDED_RUNS if record else 1)
    if record:
        write(found, against)
        screen.print(f"{len(found)} ratios are in {against}.")
    findings = once_more(judge(found, recorded), found, again, recorded)
    show(sheet(findings), console=screen)
    if not record:
        raise typer.Exit(_verdict(findings, recorded, families, screen, strict=other_machines))


def _verdict(
    findings: Sequence[Finding], recorded: Recorded | None, families: Sequence[str], screen: Console, *, strict: bool
) -> int:
    """The exit code, and why."""
    if recorded is None:
        screen.print("No ratios have been recorded: nothing was compared.")
        return 1
    missing = left_out({one.name: one.now for one in findings}, recorded.ratios)
    if len(families) == len(FAMILIES) and missing:
        screen.print(f"Recorded, and not measured: {', '.join(missing)}.")
    else:
        missing = []
    worse = [one.name for one in findings if one.verdict == "worse"]
    screen.print(f"Recorded at {recorded.commit} on {recorded.date}: {recorded.machine}")
    if not recorded.is_of(machine()) and not strict:
        screen.print("That is another kind of machine than this one, so nothing is decided (--other-machines does).")
        return 0
    if worse:
        screen.print(f"Worse than recorded, twice: {', '.join(worse)}.", style="bold red")
    return REGRESSION if worse or missing else 0


if __name__ == "__main__":
    run(main)
