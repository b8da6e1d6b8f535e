"""The error tree survives the wire."""

import pytest

from shared import errors
from shared.errors import BrokerFull, InternalError, LinkLost, NobodyThere, RyzansteinError, error_from_code, reason_of


def _kinds(root: type[RyzansteinError]) -> list[type[RyzansteinError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _kinds(child))]


KINDS = [kind for kind in _kinds(RyzansteinError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_code_brings_back_kind_and_retryability(kind: type[RyzansteinError]) -> None:
    back = error_from_code(kind.code, "why")
    assert (back.code, back.retryable, str(back)) == (kind.code, kind.retryable, "why")


def test_codes_are_unique_but_for_the_root_and_what_stays_inside() -> None:
    codes = [kind.code for kind in KINDS if kind not in (RyzansteinError, BrokerFull, LinkLost, NobodyThere)]
    assert len(codes) == len(set(codes))


def test_an_unknown_code_is_our_fault() -> None:
    assert type(error_from_code("from_the_future", "why")) is InternalError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("It is wrong.\nSee the manual."), "It is wrong"),
        (
            ValueError("Validation of 'x':\n    TypeError: expected int\n  at x"),
            "Validation of 'x': TypeError: expected int",
        ),
        (KeyError("strange"), "it does not know 'strange'"),
        (ValueError(), "ValueError"),
    ],
)
def test_the_reason_of_a_librarys_error_is_one_line(error: Exception, text: str) -> None:
    assert reason_of(error) == text
