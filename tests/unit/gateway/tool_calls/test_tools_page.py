"""docs/tools.md names every reasoning parser."""

from pathlib import Path

from services.gateway.tool_calls.families import REASONING_NAMES

PAGE = (Path(__file__).parents[4] / "docs" / "tools.md").read_text()


def test_every_reasoning_parser_is_named() -> None:
    section = PAGE.partition("## Reasoning")[2].partition("\n## ")[0]
    assert [name for name in REASONING_NAMES if f"`{name}`" not in section] == []
