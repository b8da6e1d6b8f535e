"""docs/api.md names every error code that a client can see."""

import re
from pathlib import Path

import pytest

from services.gateway.core.errors import RequestTimeout
from shared import errors

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "api.md").read_text()


def kinds(root: type[errors.RyzansteinError]) -> set[str]:
    return {root.code}.union(*(kinds(child) for child in root.__subclasses__()))


def codes() -> set[str]:
    source = "".join(path.read_text() for path in (ROOT / "services" / "gateway").rglob("*.py"))
    reasons = set(re.findall(r'reason="(\w+)"', source))
    ranges = {f"{kind}_{side}_value" for kind in ("integer", "decimal") for side in ("below_min", "above_max")}
    assert {"invalid_json", "duplicate_id", "unknown_url"} <= reasons
    found = kinds(errors.InvalidRequest) | kinds(errors.Unavailable)
    return reasons | ranges | found | {RequestTimeout.code, errors.InternalError.code}


@pytest.mark.parametrize("code", sorted(codes()))
def test_the_page_names(code: str) -> None:
    assert f"`{code}`" in PAGE


@pytest.mark.parametrize("status", [400, 404, 405, 408, 413, 422, 429, 500, 503, 504, 1009, 1012])
def test_the_page_has_the_status(status: int) -> None:
    assert f"| {status} |" in PAGE
