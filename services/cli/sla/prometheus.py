"""A report's figures from Prometheus, which does the arithmetic: one instant query for each, at the period's end.

A counter's growth is its last value less its first, from 0 for a series that began within the period (`increase` does
not see a first value, and an error that happens once is just that); of a process that restarted it is `increase`'s.
Up is a model while one of its groups is ready or busy and a gateway answers its scrapes.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx

from services.cli.sla.periods import Interval
from services.cli.sla.report import TIMES, NoData, Report, ReportScope, percentiles, scope_of
from services.cli.target import trust_of
from shared.errors import ConfigurationError, RyzansteinError, Unavailable

SMALLEST_STEP = 5.0  # seconds: the scrape interval that the project's own configuration sets
MOMENTS = 20_000  # of the period, at which Prometheus looks whether a model was up
TIMEOUT = 60.0
# By status or its first digit; the gateway's 499: the client gave the request up.
ENDS = {"499": "cancelled", "4": "refused", "5": "failed"}

# Where generations begin: other requests are no part of the service that the report is about.
_ROUTES = (
    r"/v1/(chat/completions|completions|responses|embeddings|stream)"
    r"|/ryzanstein\\.v1\\.InferenceService/(Generate|Chat|ChatSession|Embed)"
)
_GATEWAY = "ryzanstein_gateway"
_PRESENT = f"{_GATEWAY}_generations_in_flight"
_BLOCKS = 'ryzanstein_executor_kv_blocks{model!=""}'  # by model; there while one of its groups is up


def queries(period: Interval, step: float, gateway_job: str) -> dict[str, str]:
    """What is asked, by name. `step`: seconds between two looks at what was up."""
    p = f"{math.ceil(period.seconds * 1000)}ms"
    every = f"[{p}:{math.ceil(step)}s]"

    def grown(metric: str, by: str) -> str:
        last_less_first = f"({metric} - {metric} offset {p}) and resets({metric}[{p}]) == 0"
        new = f"({metric} unless {metric} offset {p})"
        return f"sum by ({by}) ({new} or ({last_less_first}) or increase({metric}[{p}]))"

    # A monitor that knows no group at all has no series of groups; that it writes records shows that it is there.
    groups = 'sum(max by (state) (ryzanstein_health_groups{state=~"ready|busy"}))'
    ready = f"{groups} or 0 * max(ryzanstein_health_writes_total)"
    answering = f'sum(up{{job="{gateway_job}"}})'
    any_up = f"((({ready}) or count(up)) > bool 0) * (({answering} or count(up)) > bool 0)"
    known = f"0 * sum by (model) (last_over_time({_BLOCKS}[{p}]))"
    model_up = f"(((sum by (model) ({_BLOCKS}) > bool 0) or {known}) * on () group_left () ({any_up}))"
    all_up = f"(({any_up}) * (min({model_up}) or count(up) > bool 0))"
    return {
        "present": f"max_over_time(count({_PRESENT}){every})",
        "covered": f"count_over_time(count(up){every})",
        "requests": grown(f'{_GATEWAY}_requests_total{{route=~"{_ROUTES}"}}', "model, status"),
        "first_token": grown(f"{_GATEWAY}_first_token_seconds_bucket", "model, le"),
        "between_tokens": grown(f"{_GATEWAY}_between_tokens_seconds_bucket", "model, le"),
        "end_to_end": grown(f'{_GATEWAY}_request_seconds_bucket{{route=~"{_ROUTES}"}}', "model, le"),
        "prompt": grown(f"{_GATEWAY}_prompt_tokens_total", "model"),
        "cached": grown(f"{_GATEWAY}_cached_tokens_total", "model"),
        "output": grown(f"{_GATEWAY}_output_tokens_total", "model"),
        "up": f"avg_over_time({all_up}{every})",
        "up_of": f"avg_over_time({model_up}{every})",
        "repaired": f"resets((1 - {all_up}){every})",
        "repaired_of": f"resets((1 - {model_up}){every})",
    }


class Sample(NamedTuple):
    """One series of an answer."""

    labels: dict[str, str]
    value: float


Answers = dict[str, list[Sample]]


def from_prometheus(
    client: httpx.Client, period: Interval, *, step: float, gateway_job: str, progress: Callable[[float], None]
) -> Report:
    """Asks for everything that a report needs; `step`: 0 for as fine as the period allows. Raises `NoData`, and what
    `ask` raises."""
    step = step or max(SMALLEST_STEP, period.seconds / MOMENTS)
    asked = queries(period, step, gateway_job)
    answers: Answers = {}
    for number, (name, query) in enumerate(asked.items()):
        progress(number / len(asked))
        answers[name] = ask(client, query, period.end)
        if name == "present" and not answers[name]:
            raise NoData(
                f"{_where(client)} has nothing of the gateways (metric {_PRESENT}) in the period; have it scrape their "
                "/metrics, or ask for a period that it has."
            )
    seconds = min(period.seconds, sum(one.value for one in answers["covered"]) * math.ceil(step))
    models = {one.labels.get("model", "") for name in ("requests", "output", "up_of") for one in answers[name]}
    scopes = [_scope(answers, model, seconds) for model in sorted({"", *models})]
    covered = Interval(period.end - seconds, period.end)
    return Report(_where(client), *period, [covered], scopes, _notes(answers, scopes))


def _scope(answers: Answers, model: str, covered: float) -> ReportScope:
    """Of one model; empty: of all. `covered`: seconds."""

    def of(name: str, label: str) -> dict[str, float]:
        """Sums by the values of that label."""
        sums: defaultdict[str, float] = defaultdict(float)
        for one in answers[name]:
            if not model or one.labels.get("model") == model:
                sums[one.labels.get(label, "")] += one.value
        return sums

    counts = {name: sum(of(name, "model").values()) for name in ("prompt", "cached", "output")}
    for status, count in of("requests", "status").items():
        end = ENDS.get(status) or ENDS.get(status[:1], "completed")
        counts[end] = counts.get(end, 0.0) + count
    up, repaired = (of(f"{name}_of" if model else name, "model").values() for name in ("up", "repaired"))
    availability = min(1.0, *up) if up else None
    downtime = 0.0 if availability is None else (1 - availability) * covered
    repairs = round(sum(repaired))
    return scope_of(
        model,
        counts,
        {name: percentiles({float(le): count for le, count in of(name, "le").items()}) for name in TIMES[:3]},
        availability=availability,
        downtime=downtime,
        repaired=repairs,
        mttr=downtime / max(1, repairs) if downtime else None,
    )


def _notes(answers: Answers, scopes: list[ReportScope]) -> list[str]:
    notes = ["Prometheus knows when groups and gateways were up; the journal knows each outage and interruption."]
    if not answers["up_of"]:
        notes.append("The executors' metrics name no model: which model had no ready group is not known.")
    if len(scopes) > 1:
        notes.append("Prometheus has end-to-end times of all models together, not of each.")
    return notes


# --- its HTTP API --------------------------------------------------------------------------------


class PrometheusError(RyzansteinError):
    """Prometheus refused a query, or is none."""


def client_of(
    url: str, token_file: Path | None = None, basic_auth_file: Path | None = None, ca: str = ""
) -> httpx.Client:
    """`ca`: file of the authorities to trust. Raises `ConfigurationError`."""
    parts = httpx.URL(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigurationError(f"--prometheus cannot be {url!r}; it is like http://prometheus:9090.")
    if parts.userinfo:
        raise ConfigurationError(
            "--prometheus must not hold a password, which everybody on the machine can read; name a file with "
            "--prometheus-basic-auth-file."
        )
    if token_file and basic_auth_file:
        raise ConfigurationError("A Prometheus takes a bearer token or a user's password; name one of the files.")
    headers = {"authorization": f"Bearer {_secret(token_file)}"} if token_file else {}
    user, colon, password = (_secret(basic_auth_file) if basic_auth_file else "").partition(":")
    if user and not colon:
        raise ConfigurationError(f"{basic_auth_file} must have one line, user:password.")
    auth = httpx.BasicAuth(user, password) if colon else None
    return httpx.Client(base_url=parts, timeout=TIMEOUT, verify=trust_of("", ca), headers=headers, auth=auth)


def _secret(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The file {path} cannot be read ({error}); name one that can.") from None
    if not text or not text.isprintable():
        raise ConfigurationError(f"The file {path} must have one printable line.")
    return text


def _where(client: httpx.Client) -> str:
    return f"Prometheus at {str(client.base_url).rstrip('/')}"


def ask(client: httpx.Client, query: str, at: float) -> list[Sample]:
    """Values of `query` at `at` (unix seconds). Raises `Unavailable`, `PrometheusError`, `ConfigurationError`."""
    where = _where(client)
    try:
        response = client.post("api/v1/query", data={"query": query, "time": at})
    except httpx.TimeoutException:
        raise Unavailable(
            f"{where} did not answer within {TIMEOUT:g} s; ask for a shorter period or a larger --step."
        ) from None
    except httpx.HTTPError as error:
        raise Unavailable(
            f"{where} cannot be reached ({error or type(error).__name__}); start it, or name another with "
            "--prometheus. Without one the journal is read."
        ) from None
    if response.status_code in (401, 403):
        raise ConfigurationError(
            f"{where} asks for credentials ({response.status_code}); name a file with --prometheus-token-file or "
            "--prometheus-basic-auth-file."
        )
    try:
        answer = response.json()
        if answer["status"] == "success":
            return [Sample(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]
    except (ValueError, LookupError, TypeError):
        raise PrometheusError(
            f"{where} answered {response.status_code} with what is not Prometheus' API; name the address under which "
            "/api/v1/query is."
        ) from None
    raise PrometheusError(f"{where} refused a query: {answer.get('error') or response.status_code}.")
