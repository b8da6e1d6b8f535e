"""The command `ryzanstein sla`."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress, TextColumn

from services.cli.sla.journal import from_journal
from services.cli.sla.periods import EXAMPLES, period_of, span_of, zone_of
from services.cli.sla.prometheus import client_of, from_prometheus
from services.cli.sla.report import Indicator, judge, markdown, print_report
from services.cli.target import DataDir, NatsUrl, nats_of_stack
from services.cli.ui import bar_columns, console
from shared.errors import ConfigurationError

FORMATS = ("table", "json", "markdown")
MISSED = 2  # exit code of --check

option = typer.Option


def sla(
    begin: Annotated[
        str, option("--from", help=f"Start of the period: {EXAMPLES}. Default: 24 hours before its end.")
    ] = "",
    end: Annotated[str, option("--to", help="End of the period, likewise. Default: now.")] = "",
    last: Annotated[str, option(help="Length of the period, instead of --from, like 90m, 24h or 30d.")] = "",
    timezone: Annotated[
        str,
        option(
            help="Time zone of the report and of times without an offset, like UTC or Europe/Zurich.",
            show_default="this machine's",
        ),
    ] = "",
    prometheus: Annotated[
        str,
        option(
            help="Report from this Prometheus (http://host:9090). Without it: from the journal in NATS. "
            "[env: RYZANSTEIN_PROMETHEUS_URL, unless --nats-url or --data-dir name a journal]"
        ),
    ] = "",
    prometheus_token_file: Annotated[
        Path | None,
        option(
            envvar="RYZANSTEIN_PROMETHEUS_TOKEN_FILE",
            help="File with the bearer token that it asks for.",
            dir_okay=False,
        ),
    ] = None,
    prometheus_basic_auth_file: Annotated[
        Path | None,
        option(
            envvar="RYZANSTEIN_PROMETHEUS_BASIC_AUTH_FILE",
            help="File with user:password, where it asks for these.",
            dir_okay=False,
        ),
    ] = None,
    prometheus_ca: Annotated[
        str,
        option(
            envvar="RYZANSTEIN_PROMETHEUS_CA",
            help="File of the authorities to trust (PEM), for an https:// Prometheus.",
        ),
    ] = "",
    gateway_job: Annotated[
        str, option(help="Prometheus' name of the job that scrapes the gateways.")
    ] = "ryzanstein-gateway",
    step: Annotated[
        str,
        option(
            help="Prometheus: resolution of the downtime, at least its scrape interval.",
            show_default="as fine as the period allows",
        ),
    ] = "",
    silence: Annotated[
        str, option(help="Journal: a model with waiting requests and no token for this long is down.")
    ] = "10s",
    target_availability: Annotated[float, option(help="In per cent, of the time.", min=0, max=100)] = 99.9,
    target_error_rate: Annotated[float, option(help="In per cent, of the requests; at most.", min=0, max=100)] = 0.1,
    target_mttr: Annotated[str, option(help="Mean time to recovery, at most; like 5m.")] = "5m",
    target_first_token: Annotated[str, option(help="95th percentile, at most; like 2s.", show_default="none")] = "",
    target_between_tokens: Annotated[str, option(help="Likewise, between two tokens.", show_default="none")] = "",
    target_end_to_end: Annotated[str, option(help="Likewise, of whole requests.", show_default="none")] = "",
    check: Annotated[
        bool, option("--check", help="Exit code 2 where a target is missed, or the source has no data for it.")
    ] = False,
    form: Annotated[str, option("--format", help="Output format.", metavar="|".join(FORMATS))] = "table",
    data_dir: DataDir = None,
    nats_url: NatsUrl = "",
) -> None:
    """Report availability, error rate, latencies and recovery times of a period, and whether targets are met.

    From Prometheus where one is named, else from the journal, which has the last hour unless it was set to keep
    more. What counts as an error and as an outage stands in docs/sla.md.
    """
    if form not in FORMATS:
        raise ConfigurationError(f"--format cannot be {form!r}; it is one of {', '.join(FORMATS)}.")
    if prometheus and (nats_url or data_dir):
        raise ConfigurationError("--prometheus and --nats-url or --data-dir name two sources; name one.")
    if not (nats_url or data_dir):
        prometheus = prometheus or os.environ.get("RYZANSTEIN_PROMETHEUS_URL", "")
    zone = zone_of(timezone)
    period = period_of(begin, end, last, time.time(), zone)
    targets: dict[Indicator, float] = {"availability": target_availability / 100, "error_rate": target_error_rate / 100}
    times: dict[Indicator, str] = {
        "mttr": target_mttr,
        "first_token_p95": target_first_token,
        "between_tokens_p95": target_between_tokens,
        "end_to_end_p95": target_end_to_end,
    }
    for name, text in times.items():
        if text:
            targets[name] = span_of(text, f"--target-{name.removesuffix('_p95').replace('_', '-')}")
    if prometheus:
        client = client_of(prometheus, prometheus_token_file, prometheus_basic_auth_file, prometheus_ca)
        with client, _bar("prometheus") as progress:
            every = span_of(step, "--step") if step else 0.0
            report = from_prometheus(client, period, step=every, gateway_job=gateway_job, progress=progress)
    else:
        settings = nats_of_stack(data_dir, nats_url)
        quiet = span_of(silence, "--silence")
        with _bar("journal") as progress:
            report = asyncio.run(from_journal(settings, period, silence=quiet, zone=zone, progress=progress))
    report.verdicts = judge(targets, report.scopes)
    if form == "table":
        print_report(report, console(), zone)
    else:
        print(markdown(report, zone) if form == "markdown" else msgspec.json.encode(report).decode())  # noqa: T201
    if check and not all(verdict.met for verdict in report.verdicts):
        raise typer.Exit(MISSED)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[float], None]]:
    """On standard error, and gone when it is done: the report alone is on standard output."""
    screen = Console(stderr=True)
    columns = bar_columns(TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(f"reading: {what}", total=1.0)
        yield lambda share: progress.update(task, completed=share)


def add_to(app: typer.Typer) -> None:
    app.command()(sla)
