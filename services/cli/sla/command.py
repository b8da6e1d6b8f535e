"""The command `ryzanstein sla`."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import tzinfo
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from services.cli.sla.journal import Findings, from_journal
from services.cli.sla.periods import EXAMPLES, Interval, length_of, period_of, shown, span_of, zone_of
from services.cli.sla.prometheus import Prometheus, auth_of, from_prometheus
from services.cli.sla.report import Indicator, Report, judge, markdown, print_report
from services.cli.target import DataDir, NatsUrl, nats_of_stack
from services.cli.ui import bar_columns, console
from shared.errors import ConfigurationError

FORMATS = ("table", "json", "markdown")
MISSED = 2
"""Exit code of --check."""


def sla(
    begin: Annotated[
        str,
        typer.Option("--from", help=f"Start of the period: {EXAMPLES}. Default: 24 hours before its end."),
    ] = "",
    end: Annotated[str, typer.Option("--to", help="End of the period, likewise. Default: now.")] = "",
    last: Annotated[
        str, typer.Option(help="Length of the period, instead of --from, like 90m, 24h or 30d.")
    ] = "",
    timezone: Annotated[
        str,
        typer.Option(
            help="Time zone of the report and of times without an offset, like UTC or Europe/Zurich.",
            show_default="this machine's",
        ),
    ] = "",
    prometheus: Annotated[
        str,
        typer.Option(
            help="Report from this Prometheus (http://host:9090). Without it: from the journal in NATS. "
            "[env: RYZANSTEIN_PROMETHEUS_URL, unless --nats-url or --data-dir name a journal]"
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--prometheus-token-file",
            envvar="RYZANSTEIN_PROMETHEUS_TOKEN_FILE",
            help="File with the bearer token that it asks for.",
            dir_okay=False,
        ),
    ] = None,
    basic_auth_file: Annotated[
        Path | None,
        typer.Option(
            "--prometheus-basic-auth-file",
            envvar="RYZANSTEIN_PROMETHEUS_BASIC_AUTH_FILE",
            help="File with user:password, where it asks for these.",
            dir_okay=False,
        ),
    ] = None,
    ca: Annotated[
        str,
        typer.Option(
            "--prometheus-ca",
            envvar="RYZANSTEIN_PROMETHEUS_CA",
            help="File of the authorities to trust (PEM), for an https:// Prometheus.",
        ),
    ] = "",
    gateway_job: Annotated[
        str, typer.Option(help="Prometheus' name of the job that scrapes the gateways.")
    ] = "ryzanstein-gateway",
    step: Annotated[
        str,
        typer.Option(
            help="Prometheus: resolution of the downtime, at least its scrape interval.",
            show_default="as fine as the period allows",
        ),
    ] = "",
    silence: Annotated[
        str, typer.Option(help="Journal: a model with waiting requests and no token for this long is down.")
    ] = "10s",
    availability: Annotated[
        float, typer.Option("--target-availability", help="In per cent, of the time.", min=0, max=100)
    ] = 99.9,
    error_rate: Annotated[
        float,
        typer.Option("--target-error-rate", help="In per cent, of the requests; at most.", min=0, max=100),
    ] = 0.1,
    mttr: Annotated[
        str, typer.Option("--target-mttr", help="Mean time to recovery, at most; like 5m.")
    ] = "5m",
    first_token: Annotated[
        str,
        typer.Option("--target-first-token", help="95th percentile, at most; like 2s.", show_default="none"),
    ] = "",
    between_tokens: Annotated[
        str,
        typer.Option("--target-between-tokens", help="Likewise, between two tokens.", show_default="none"),
    ] = "",
    end_to_end: Annotated[
        str, typer.Option("--target-end-to-end", help="Likewise, of whole requests.", show_default="none")
    ] = "",
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Exit code 2 where a target is missed, or the source has no data for it."
        ),
    ] = False,
    format: Annotated[  # noqa: A002  # the option's name
        str, typer.Option("--format", help="How it is printed.", metavar="|".join(FORMATS))
    ] = "table",
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Report availability, error rate, latencies and recovery times of a period, and whether targets are met.

    From Prometheus where one is named, else from the journal, which has the last hour unless it was set to keep
    more. What counts as an error and as an outage stands in docs/sla.md.
    """
    if format not in FORMATS:
        raise ConfigurationError(f"--format cannot be {format!r}; it is one of {', '.join(FORMATS)}.")
    if prometheus and (nats_url or data_dir):
        raise ConfigurationError("--prometheus and --nats-url or --data-dir name two sources; name one.")
    if not (nats_url or data_dir):
        prometheus = prometheus or os.environ.get("RYZANSTEIN_PROMETHEUS_URL", "")
    zone = zone_of(timezone)
    period = period_of(begin, end, last, time.time(), zone)
    targets = _targets(availability, error_rate, mttr, first_token, between_tokens, end_to_end)
    if prometheus:
        fine = _step(step)
        auth = auth_of(token_file, basic_auth_file)
        with _bar("prometheus") as progress, Prometheus(prometheus, auth=auth, ca=ca) as client:
            found = from_prometheus(client, period, step=fine, gateway_job=gateway_job, progress=progress)
    else:
        settings = nats_of_stack(data_dir, nats_url)
        quiet = span_of(silence, "--silence")
        with _bar("journal") as progress:
            found = asyncio.run(from_journal(settings, period, silence=quiet, zone=zone, progress=progress))
    report = _report(found, period, targets, zone)
    _print(report, format, zone)
    if check and not report.met:
        raise typer.Exit(MISSED)


def _targets(
    availability: float, error_rate: float, mttr: str, first_token: str, between_tokens: str, end_to_end: str
) -> dict[Indicator, float]:
    targets: dict[Indicator, float] = {"availability": availability / 100, "error_rate": error_rate / 100}
    times: tuple[tuple[Indicator, str, str], ...] = (
        ("mttr", mttr, "--target-mttr"),
        ("first_token_p95", first_token, "--target-first-token"),
        ("between_tokens_p95", between_tokens, "--target-between-tokens"),
        ("end_to_end_p95", end_to_end, "--target-end-to-end"),
    )
    return targets | {indicator: _time(text, option) for indicator, text, option in times if text}


def _time(text: str, option: str) -> float:
    """As `span_of`, and milliseconds."""
    if text.endswith("ms") and text[:-2].replace(".", "", 1).isdecimal():
        return float(text[:-2]) / 1e3
    return span_of(text, option)


def _step(text: str) -> float:
    seconds = span_of(text, "--step") if text else 0.0
    if 0 < seconds < 1:
        raise ConfigurationError(
            "--step must be 1s or more; a step shorter than the scrape interval adds nothing."
        )
    return seconds


def _report(found: Findings, period: Interval, targets: dict[Indicator, float], zone: tzinfo) -> Report:
    notes = list(found.notes)
    covered = length_of(found.covered)
    if covered < period.seconds - 60 and found.covered:
        notes.insert(
            0,
            f"{covered / period.seconds:.1%} of the period is covered: the source begins at "
            f"{shown(found.covered[0].begin, zone)}. The figures are of that part alone.",
        )
    return Report(
        source=found.source,
        begin=period.begin,
        end=period.end,
        covered=[(one.begin, one.end) for one in found.covered],
        scopes=found.scopes,
        verdicts=judge(targets, found.scopes),
        notes=notes,
    )


def _print(report: Report, form: str, zone: tzinfo) -> None:
    if form == "json":
        print(msgspec.json.encode(report).decode())  # noqa: T201
    elif form == "markdown":
        print(markdown(report, zone))  # noqa: T201
    else:
        print_report(report, console(), zone)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[float], None]]:
    """On standard error, and gone when it is done: the report alone is on standard output."""
    screen = Console(stderr=True)
    columns = bar_columns(TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(f"reading: {what}", total=1.0)
        yield lambda share: progress.update(task, completed=share)
