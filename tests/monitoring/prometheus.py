"""What one asks a Prometheus."""

import time
from typing import Any

import httpx


class Prometheus:
    """Asked through its HTTP API. Raises AssertionError with its words where it finds fault with a query."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, trust_env=False, timeout=30)

    def query(self, expr: str) -> list[Any]:
        """What there is now."""
        return list(self.asked("/api/v1/query", query=expr)["result"])

    def query_range(self, expr: str, start: float, end: float, step: float) -> list[Any]:
        given = {"query": expr, "start": str(start), "end": str(end), "step": str(step)}
        return list(self.asked("/api/v1/query_range", **given)["result"])

    def label_values(self, metric: str, label: str) -> list[str]:
        now = time.time()
        path = f"/api/v1/label/{label}/values"
        return list(self.asked(path, **{"match[]": metric, "start": str(now - 60), "end": str(now + 1)}))

    def targets(self) -> list[Any]:
        return list(self.asked("/api/v1/targets")["activeTargets"])

    def close(self) -> None:
        self._http.close()

    def asked(self, path: str, **parameters: str) -> Any:
        answer = self._http.get(path, params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        assert not answer.get("warnings"), answer["warnings"]
        return answer["data"]


def until(condition: Any, seconds: float, pause: float = 0.1) -> None:
    """Returns once `condition()` is true. Raises AssertionError after `seconds`."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"not within {seconds:g} s"
        time.sleep(pause)
