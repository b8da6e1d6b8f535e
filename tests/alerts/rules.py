"""The alert and recording rules as data, what they name, and the same in less time."""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).parents[2] / "monitoring"
RULES = MONITORING / "rules" / "ryzanstein.yml"
TESTS = MONITORING / "rules" / "tests"

# Metrics that the rules read and no service tells yet. Once they are told it must be empty, and their alerts are
# fired like the others.
PENDING: set[str] = set()

_MILLISECONDS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+)(ms|[smhd])")
_WINDOW = re.compile(r"\[(\w+)\]")
_NAME = re.compile(r"\b((?:ryzanstein|process)[a-z0-9_:]*|up)\b")
_STRING = re.compile(r'"[^"]*"')

Document = dict[str, Any]


def load() -> Document:
    document: Document = yaml.safe_load(RULES.read_text())
    return document


def rules(document: Document) -> Iterator[dict[str, Any]]:
    for group in document["groups"]:
        yield from group["rules"]


def alerts(document: Document) -> list[dict[str, Any]]:
    return [rule for rule in rules(document) if "alert" in rule]


def names_in(expression: str) -> set[str]:
    """Metrics that an expression reads."""
    return set(_NAME.findall(_STRING.sub('""', expression)))


def kebab(name: str) -> str:
    """RyzansteinNoGateway -> ryzanstein-no-gateway."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def milliseconds(text: str) -> int:
    """Of a duration as Prometheus writes it, such as 1m30s."""
    assert re.fullmatch(rf"(?:{_DURATION.pattern})+", text), text
    return sum(int(number) * _MILLISECONDS[unit] for number, unit in _DURATION.findall(text))


def scaled(document: Document, factor: float, others: Mapping[str, float] | None = None) -> Document:
    """The same rules in `factor` times less time: windows of range vectors, `for` and the groups' intervals.

    Expressions and thresholds stay as they are. `others`: factors of rules that need one of their own, by name.
    """
    document = copy.deepcopy(document)
    for group in document["groups"]:
        group["interval"] = _shorter(group["interval"], factor)
        for rule in group["rules"]:
            of_rule = (others or {}).get(rule.get("alert") or rule["record"], factor)
            rule["expr"] = _WINDOW.sub(lambda found: f"[{_shorter(found[1], of_rule)}]", rule["expr"])  # noqa: B023
            if "for" in rule:
                rule["for"] = _shorter(rule["for"], of_rule)
    return document


def _shorter(duration: str, factor: float) -> str:
    return f"{max(1, round(milliseconds(duration) / factor))}ms"
