"""Prometheus' HTTP API: series over a period, in parts that it answers."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec

from services.cli.chat import trust_of
from services.cli.sla.intervals import Interval
from services.cli.sla.series import Series
from shared.errors import ConfigurationError, RyzansteinError, Unavailable

POINTS = 5000
"""Of each series in one answer; Prometheus gives at most 11,000."""
TIMEOUT = 60.0


class _Result(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    values: list[tuple[float, str]]


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
    """Asks for series. Use as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        auth: httpx.Auth | dict[str, str] | None = None,
        ca: str = "",
        asked: Callable[[], None] = lambda: None,
    ) -> None:
        """`ca`: file of the authorities to trust; `asked`: called after each query."""
        parts = httpx.URL(url) if "://" in url else httpx.URL(f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigurationError(f"--prometheus cannot be {url!r}; it is like http://prometheus:9090.")
        if parts.password or parts.userinfo:
            raise ConfigurationError(
                "--prometheus must not hold a password, which everybody on the machine can read; name a file "
                "with --prometheus-basic-auth-file."
            )
        self.where = str(parts).rstrip("/")
        self._asked = asked
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

    def queries(self, period: Interval, step: float) -> int:
        """How many questions `series` asks."""
        return -(-(1 + round(period.seconds / step)) // POINTS)

    def series(self, query: str, period: Interval, step: float) -> list[Series]:
        """Values of `query` at the period's begin, and every `step` seconds to its end, of which `step` is a part.
        Raises `Unavailable`, `PrometheusError`, `ConfigurationError`."""
        found: dict[tuple[tuple[str, str], ...], Series] = {}
        last = round(period.seconds / step)
        for first in range(0, last + 1, POINTS):
            begin, end = (period.begin + step * at for at in (first, min(last, first + POINTS - 1)))
            for result in self._ask(query, begin, end, step):
                labels = {name: value for name, value in result.metric.items() if name != "__name__"}
                one = found.setdefault(tuple(sorted(labels.items())), Series(labels, []))
                one.samples.extend((at, float(value)) for at, value in result.values)
        return list(found.values())

    def _ask(self, query: str, begin: float, end: float, step: float) -> list[_Result]:
        given: dict[str, Any] = {"query": query, "start": begin, "end": end, "step": step}
        try:
            response = self._client.post("/api/v1/query_range", data=given)
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
        self._asked()
        if response.status_code in (401, 403):
            raise ConfigurationError(
                f"Prometheus at {self.where} asks for credentials ({response.status_code}); name a file with "
                "--prometheus-token-file or --prometheus-basic-auth-file."
            )
        return self._results(response)

    def _results(self, response: httpx.Response) -> list[_Result]:
        try:
            answer = _decoder.decode(response.content)
        except msgspec.DecodeError:
            raise PrometheusError(
                f"{self.where} answered {response.status_code} with what is not Prometheus' API; name the address "
                "under which /api/v1/query_range is."
            ) from None
        if answer.status != "success" or answer.data is None:
            raise PrometheusError(
                f"Prometheus at {self.where} refused a query: {answer.error or response.status_code}."
            )
        return answer.data.result
