"""What others build on changes only with its recorded list, and a list only with the changelog."""

import subprocess
from typing import Literal

import msgspec
import pytest

from tests.docs.pages import ROOT
from tests.interfaces import recorded_lists
from tests.interfaces.http import _form
from tests.interfaces.recorded_lists import DIRECTORY, KINDS, changes, recorded
from tests.interfaces.structs import fields, reached


@pytest.mark.parametrize("kind", KINDS)
def test_an_interface_changes_with_its_recorded_list_alone(kind: str) -> None:
    found = changes(kind)
    assert not found, "\n".join(
        [
            f"The {kind} interface is another one. If docs/compatibility.md lets it change, say so in CHANGELOG.md and "
            f"run `python -m tests.interfaces {kind} --record`:",
            *found,
        ]
    )


def test_every_recorded_list_is_one_of_a_kind_and_says_something() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.txt")} == set(KINDS)
    assert [kind for kind in KINDS if len(recorded(kind)) < 10] == []


def test_a_list_is_changed_in_a_commit_that_changes_the_changelog() -> None:
    """Of all commits since there are lists, merges apart."""
    command = ["git", "log", "--no-merges", "--format=commit %h", "--name-only", "--", str(DIRECTORY), "CHANGELOG.md"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip("this is no checkout of the repository")
    commits = [commit.split() for commit in told.stdout.split("commit ")[1:]]
    of_lists = [names for names in commits if any("interfaces/recorded" in name for name in names)]
    assert [names[0] for names in of_lists if "CHANGELOG.md" not in names] == []


def test_a_change_is_shown_as_what_has_gone_and_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recorded("package")
    monkeypatch.setitem(recorded_lists.KINDS, "package", lambda: ["a new line", *before[1:]])
    assert changes("package") == [f"- {before[0]}", "+ a new line"]


class Part(msgspec.Struct, array_like=True):
    name: str
    size: int = 0


class Whole(msgspec.Struct, tag="whole"):
    parts: list[Part] = []
    state: Literal["open", "shut"] | None = None


def test_a_struct_is_told_by_what_its_bytes_hold() -> None:
    assert reached([dict[str, Whole | None]]) == [Part, Whole]
    assert list(fields(Part)) == ["Part[0] name: str", "Part[1] size: int = 0"]
    assert list(fields(Whole)) == [
        "Whole: type = 'whole'",
        "Whole.parts: list[Part] = []",
        "Whole.state: Literal['open', 'shut'] | None = None",
    ]


def test_what_a_schema_says_to_people_is_no_part_of_it() -> None:
    schema = {"title": "T", "type": "object", "properties": {"title": {"type": "string", "description": "Of a page."}}}
    assert _form(schema) == '{"type": "object", "properties": {"title": {"type": "string"}}}'
