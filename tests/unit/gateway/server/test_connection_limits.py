"""How many connections the limit of open files leaves."""

import resource

import pytest
from structlog.testing import capture_logs

from services.gateway.server import connections
from services.gateway.server.connections import OTHER_FILES, REFUSED, RESERVED, allowed_by_files

OTHERS = RESERVED + REFUSED + OTHER_FILES


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "allowed"),
    [
        (OTHERS + 100, OTHERS + 100, 0, 100),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 0, 100),
        (64, OTHERS + 500, OTHERS + 100, 100),
        (64, resource.RLIM_INFINITY, OTHERS + 100, 100),
        (64, OTHERS + 40, OTHERS + 40, 40),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int, allowed: int
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    with capture_logs() as logs:
        assert allowed_by_files(100) == allowed
    assert [wanted[0] for wanted in limits[1:]] == ([raised] if raised else [])
    assert [line["connections"] for line in logs] == ([allowed] if allowed < 100 else [])
