"""A release: its version stands everywhere, and its part of the changelog makes its notes."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.release.changelog import CHANGELOG, cut, notes, part
from tests.release.version import ROOT, repeated, version, write


def test_every_file_that_repeats_the_version_has_this_one() -> None:
    found = list(repeated())
    assert len({path for path, _ in found}) > 8
    assert [(path, number) for path, number in found if number != version()] == []


def test_another_version_is_written_to_all_of_them(tmp_path: Path) -> None:
    for path in {ROOT / "pyproject.toml", *(path for path, _ in repeated())}:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    write("7.8.9", tmp_path)
    assert version(tmp_path) == "7.8.9"
    assert {number for _, number in repeated(tmp_path)} == {"7.8.9"}
    assert len(list(repeated(tmp_path))) == len(list(repeated()))
    with pytest.raises(ValueError, match="not a version of three numbers"):
        write("8", tmp_path)


def workflows() -> list[dict[str, Any]]:
    return [yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]


def test_hosted_ci_runs_targets_of_the_makefile_and_nothing_else() -> None:
    """What it does can be done, and tried, anywhere."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = set()
    for job in (job for workflow in workflows() for job in workflow["jobs"].values()):
        values = {
            f"${{{{ matrix.{name} }}}}": [str(value) for value in several]
            for name, several in job.get("strategy", {}).get("matrix", {}).items()
        }
        for command in (step["run"] for step in job["steps"] if "run" in step):
            said = command.split(maxsplit=1)[1]
            assert command.startswith("make "), command
            matching = [each for name, several in values.items() if said.startswith(name) for each in several]
            asked |= {each.split()[0] for each in matching or [said]}
    assert asked - targets == set()
    assert {"test-all", "test-upgrade", "release"} <= asked


TEXT = """# Changelog

Words.

## Unreleased
- One, [a page](docs/a.md#there), [a site](https://example.com).

## 0.0.9 - 2026-01-01
- Older.
"""


def test_what_is_unreleased_becomes_a_release() -> None:
    after = cut(TEXT, "0.1.0", "2026-12-01")
    assert part(after, "Unreleased") == "Nothing yet.\n"
    assert part(after, "0.1.0") == part(TEXT, "Unreleased")
    assert part(after, "0.0.9") == "- Older.\n"
    assert "## 0.1.0 - 2026-12-01\n- One" in after
    with pytest.raises(ValueError, match="already"):
        cut(after, "0.1.0", "2026-12-02")
    with pytest.raises(ValueError, match="nothing has changed"):
        cut(after, "0.2.0", "2026-12-02")


def test_notes_are_a_release_s_part_with_links_that_lead_somewhere() -> None:
    after = cut(TEXT, "0.1.0", "2026-12-01")
    assert notes(after, "0.1.0", "https://host/x/blob/v0.1.0/") == (
        "- One, [a page](https://host/x/blob/v0.1.0/docs/a.md#there), [a site](https://example.com).\n"
    )
    with pytest.raises(ValueError, match=r"no part '0\.3\.0'"):
        notes(after, "0.3.0")


def test_the_changelog_is_one_that_can_be_read() -> None:
    """A release's part has at most 150 lines."""
    text = CHANGELOG.read_text()
    parts = re.findall(r"^## (\S+)", text, re.MULTILINE)
    assert parts[0] == "Unreleased"
    assert [name for name in parts if len(part(text, name).splitlines()) > 150] == []
