"""docs/tools.md has the families that there are."""

import re
from pathlib import Path

from services.gateway.tool_calls.families import FAMILIES, REASONING_NAMES

PAGE = (Path(__file__).parents[4] / "docs" / "tools.md").read_text()


def test_the_table_is_the_registry() -> None:
    table = PAGE.partition("| parser |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[-\w`, ]+) \| (.+) \| ([^|]+) \|$", table, re.MULTILINE)
    assert [(names.replace("`", "").split(", "), models) for names, _, models in rows] == [
        ([name, *family.names], family.models) for name, family in FAMILIES.items()
    ]


def test_every_familys_marker_stands_in_its_row() -> None:
    for name, family in FAMILIES.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}`"))
        begin = family.form.replace("\n", "").partition("NAME")[0]
        assert begin in row.replace("\\|", "|"), name


def test_every_reasoning_parser_is_named() -> None:
    section = PAGE.partition("## Reasoning")[2].partition("\n## ")[0]
    assert [name for name in REASONING_NAMES if f"`{name}`" not in section] == []
