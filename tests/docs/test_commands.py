"""A reader who types what a page or a message says is not told that there is no such command or option."""

from pathlib import Path

import pytest

from tests.docs.commands import commands, unknown_words
from tests.docs.pages import ROOT, pages

SOURCES = [path for folder in ("services", "shared", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def unknown(path: Path) -> list[str]:
    """Commands with words that there are not, and these words."""
    found = {" ".join(words): unknown_words(words) for words in commands(path.read_text())}
    return [f"{command}: {', '.join(words)}" for command, words in found.items() if words]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_commands_that_there_are(page: Path) -> None:
    assert unknown(page) == []


def test_messages_and_comments_name_commands_that_there_are() -> None:
    assert {str(path.relative_to(ROOT)): said for path in SOURCES if (said := unknown(path))} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`ryzanstein up --port 1`", []),
        ("`ryzanstein up --prot 1`", ["--prot"]),
        ("`ryzanstein models fetch NAME`", ["fetch"]),
        ("`ryzanstein serve SERVICE --help`", []),
        ("```\nA=b .venv/bin/ryzanstein status \\\n  --jsn | cat --json\n```", ["--jsn"]),
        ("```\nkubectl --namespace ryzanstein exec gateway-0 -- ryzanstein key list\n```", ["key"]),
        ("`make serve ARGS=--prot`", []),
        ("`make server`", ["server"]),
        ("`python -m benchmarks.simulation --group 3`", ["--group"]),
        ("`python -m benchmarks.simulation [--groups 3]`", []),
        ("`kubectl --namespace ryzanstein rollout status`", []),
    ],
)
def test_a_wrong_word_is_found(text: str, wrong: list[str]) -> None:
    assert [word for words in commands(text) for word in unknown_words(words)] == wrong
