"""A report's figures from Prometheus, which does the arithmetic: one instant query for each, at the period's end.

A counter's growth is its last value less its first, from 0 for a series that began within the period (`increase` does
not see a first value, and an error that happens once is just that); of a process that restarted it is `increase`'s.
Up is a model while one of its groups is ready or busy and a gateway answers its scrapes.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import httpx
import msgspec

from services.cli.sla.journal import Findings, NoData
from services.cli.sla.periods import Interval
from services.cli.sla.report import Percentiles, Requests, Scope, Tokens, bucket_percentiles
from services.cli.target import trust_of
from shared.errors import ConfigurationError, RyzansteinError, Unavailable

SMALLEST_STEP = 5.0
"""Seconds: the scrape interval that the project's own configuration sets."""
MOMENTS = 20_000
"""Of the period, at which Prometheus looks whether a model was up."""
TIMEOUT = 60.0
CLIENT_GONE = "499"
"""The gateway's status for a request that its client gave up."""

_ROUTES = (
    r"/v1/(chat/completions|completions|responses|embeddings|stream)"
    r"|/ryzanstein\\.v1\\.InferenceService/(Generate|Chat|ChatSession|Embed)"
)
"""Where generations begin: other requests are no part of the service that the report is about."""
_GATEWAY = "ryzanstein_gateway"
_PRESENT = f"{_GATEWAY}_generations_in_flight"
_BLOCKS = 'ryzanstein_executor_kv_blocks{model!=""}'
"""By model; there while one of its groups is up."""


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
"""By the names of `queries`."""


def from_prometheus(
    prometheus: "Prometheus",
    period: Interval,
    *,
    step: float,
    gateway_job: str,
    progress: Callable[[float], None],
) -> Findings:
    """Asks for everything that a report needs; `step`: 0 for as fine as the period allows. Raises `NoData`, and what
    `Prometheus.query` raises."""
    step = step or max(SMALLEST_STEP, period.seconds / MOMENTS)
    asked = queries(period, step, gateway_job)
    answers: Answers = {}
    for number, (name, query) in enumerate(asked.items()):
        progress(number / len(asked))
        answers[name] = prometheus.query(query, period.end)
        if name == "present" and not answers[name]:
            raise NoData(
                f"Prometheus at {prometheus.where} has nothing of the gateways (metric {_PRESENT}) in the period; have "
                "it scrape their /metrics, or ask for a period that it has."
            )
    seconds = min(period.seconds, _sum(answers["covered"]) * math.ceil(step))
    covered = Interval(period.end - seconds, period.end)
    models = {
        sample.labels.get("model", "") for name in ("requests", "output", "up_of") for sample in answers[name]
    }
    scopes = [
        _scope(answers, "", covered),
        *(_scope(answers, model, covered) for model in sorted(models) if model),
    ]
    return Findings(f"Prometheus at {prometheus.where}", [covered], scopes, _notes(answers, scopes))


def _scope(answers: Answers, model: str, covered: Interval) -> Scope:
    """Of one model; empty: of all."""

    def of(name: str) -> list[Sample]:
        return [sample for sample in answers[name] if not model or sample.labels.get("model", "") == model]

    requests = _requests(of("requests"))
    up, repaired = (answers[name] if not model else of(f"{name}_of") for name in ("up", "repaired"))
    availability = min(1.0, up[0].value) if up else None
    downtime = 0.0 if availability is None else (1 - availability) * covered.seconds
    repairs = round(_sum(repaired))
    return Scope(
        model=model,
        requests=requests,
        error_rate=requests.error_rate,
        availability=availability,
        downtime=downtime,
        outages=[],
        repaired=repairs,
        mttr=downtime / max(1, repairs) if downtime else None,
        first_token=_percentiles(of("first_token")),
        between_tokens=_percentiles(of("between_tokens")),
        end_to_end=_percentiles(of("end_to_end")),
        tokens=Tokens(*(round(_sum(of(name))) for name in ("prompt", "cached", "output"))),
    )


def _requests(samples: Iterable[Sample]) -> Requests:
    ends = {"completed": 0.0, "failed": 0.0, "refused": 0.0, "cancelled": 0.0}
    for sample in samples:
        ends[_end(sample.labels.get("status", ""))] += sample.value
    return Requests(**{end: round(count) for end, count in ends.items()})


def _end(status: str) -> str:
    if status == CLIENT_GONE:
        return "cancelled"
    return {"4": "refused", "5": "failed"}.get(status[:1], "completed")


def _percentiles(samples: Iterable[Sample]) -> Percentiles:
    counts: dict[float, float] = {}
    for sample in samples:
        bound = float(sample.labels.get("le", "nan"))
        counts[bound] = counts.get(bound, 0.0) + sample.value
    return bucket_percentiles(counts)


def _sum(samples: Iterable[Sample]) -> float:
    return sum(sample.value for sample in samples)


def _notes(answers: Answers, scopes: list[Scope]) -> list[str]:
    notes = [
        "Prometheus knows when groups and gateways were up; the journal knows each outage and interruption."
    ]
    if not answers["up_of"]:
        notes.append("The executors' metrics name no model: which model had no ready group is not known.")
    if len(scopes) > 1:
        notes.append("Prometheus has end-to-end times of all models together, not of each.")
    return notes


# --- its HTTP API --------------------------------------------------------------------------------


class _Result(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    value: tuple[float, str]


class _Data(msgspec.Struct, frozen=True):
    result: list[_Result] = []


class _Answer(msgspec.Struct, frozen=True):
    status: str
    data: _Data | None = None
    error: str = ""


_decoder = msgspec.json.Decoder(_Answer)


class PrometheusError(RyzansteinError):
    """Prometheus refused a query, or is none."""


def auth_of(token_file: Path | None, basic_auth_file: Path | None) -> httpx.Auth | dict[str, str] | None:
    """How a Prometheus behind a lock is asked: headers, or user and password. Raises `ConfigurationError`."""
    if token_file and basic_auth_file:
        raise ConfigurationError(
            "A Prometheus takes a bearer token or a user's password; name one of the files."
        )
    if token_file:
        return {"authorization": f"Bearer {_secret(token_file)}"}
    if basic_auth_file:
        user, colon, password = _secret(basic_auth_file).partition(":")
        if not colon:
            raise ConfigurationError(f"{basic_auth_file} must have one line, user:password.")
        return httpx.BasicAuth(user, password)
    return None


def _secret(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The file {path} cannot be read ({error}); name one that can.") from None
    if not text or not text.isprintable():
        raise ConfigurationError(f"The file {path} must have one printable line.")
    return text


class Prometheus:
    """Asks it. Use as a context manager."""

    def __init__(self, url: str, *, auth: httpx.Auth | dict[str, str] | None = None, ca: str = "") -> None:
        """`ca`: file of the authorities to trust."""
        parts = httpx.URL(url) if "://" in url else httpx.URL(f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigurationError(f"--prometheus cannot be {url!r}; it is like http://prometheus:9090.")
        if parts.password or parts.userinfo:
            raise ConfigurationError(
                "--prometheus must not hold a password, which everybody on the machine can read; name a file "
                "with --prometheus-basic-auth-file."
            )
        self.where = str(parts).rstrip("/")
        self._client = httpx.Client(
            base_url=self.where,
            timeout=TIMEOUT,
            verify=trust_of("", ca),
            headers=auth if isinstance(auth, dict) else None,
            auth=None if isinstance(auth, dict) else auth,
        )

    def __enter__(self) -> "Prometheus":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def query(self, query: str, at: float) -> list[Sample]:
        """Values of `query` at `at` (unix seconds). Raises `Unavailable`, `PrometheusError`, `ConfigurationError`."""
        try:
            response = self._client.post("/api/v1/query", data={"query": query, "time": at})
        except httpx.TimeoutException:
            raise Unavailable(
                f"Prometheus at {self.where} did not answer within {TIMEOUT:g} s; ask for a shorter period or a "
                "larger --step."
            ) from None
        except httpx.HTTPError as error:
            raise Unavailable(
                f"Prometheus at {self.where} cannot be reached ({error or type(error).__name__}); start it, or name "
                "another with --prometheus. Without one the journal is read."
            ) from None
        if response.status_code in (401, 403):
            raise ConfigurationError(
                f"Prometheus at {self.where} asks for credentials ({response.status_code}); name a file with "
                "--prometheus-token-file or --prometheus-basic-auth-file."
            )
        return [Sample(one.metric, float(one.value[1])) for one in self._results(response)]

    def _results(self, response: httpx.Response) -> list[_Result]:
        try:
            answer = _decoder.decode(response.content)
        except msgspec.DecodeError:
            raise PrometheusError(
                f"{self.where} answered {response.status_code} with what is not Prometheus' API; name the address "
                "under which /api/v1/query is."
            ) from None
        if answer.status != "success" or answer.data is None:
            raise PrometheusError(
                f"Prometheus at {self.where} refused a query: {answer.error or response.status_code}."
            )
        return answer.data.result
