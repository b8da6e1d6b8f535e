"""The compatibility page says what the server does, and nothing that a client sends is ignored in silence."""

import openai
import pytest

from tests.compatibility.__main__ import PAGE, found_on_a_stack
from tests.compatibility.operations import OPERATIONS, why_refused
from tests.compatibility.page import COMMAND, Count, page, refused, tables
from tests.compatibility.probe import Found
from tests.compatibility.walk import parameters

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return found_on_a_stack(tmp_path_factory.mktemp("compatibility"))


def test_the_page_is_what_the_server_does(found: list[Found]) -> None:
    made = page(found, openai.__version__)
    assert made == PAGE.read_text(), f"run `{COMMAND}` and look at what has changed"


def test_the_tables_have_every_parameter(found: list[Found]) -> None:
    made = tables(found, openai.__version__)
    assert [one.operation.name for one in found if f"## `{one.operation.name}`" not in made] == []
    rows = [row for one in found for row in one.parameters if not row.excluded]
    assert [row.path for row in rows if f"| `{row.path}` |" not in made] == []


def test_every_operation_is_there(found: list[Found]) -> None:
    assert [one.operation.name for one in found if not one.there] == []


@pytest.mark.parametrize("name", [one.name for one in OPERATIONS])
def test_every_parameter_is_known(found: list[Found], name: str) -> None:
    """Taken, or refused by its name as one that is not supported."""
    (one,) = (one for one in found if one.operation.name == name)
    assert [row.path for row in one.parameters if row.verdict == "missing"] == []


def test_nearly_all_that_has_a_meaning_is_honoured(found: list[Found]) -> None:
    for name in ("completions.create", "embeddings.create", "files.create", "files.list", "batches.create"):
        (one,) = (one for one in found if one.operation.name == name)
        count = Count(one.parameters)
        assert count.honoured_of_meant >= 0.9 * count.meant, name


def test_what_has_a_meaning_and_is_not_taken_has_a_reason(found: list[Found]) -> None:
    assert [row.path for operation, row in refused(found) if not why_refused(operation, row.path)] == []


def test_every_event_with_a_meaning_is_sent(found: list[Found]) -> None:
    events = [row for one in found for row in one.events if not row.excluded]
    assert len(events) == 24
    assert [row.path for row in events if row.verdict != "honoured"] == []


def test_the_walk_finds_nested_parameters() -> None:
    (chat,) = (one for one in OPERATIONS if one.name == "chat.completions.create")
    paths = {one.path for one in parameters(*chat.kinds)}
    assert {
        "temperature",
        "stream_options.include_usage",
        "messages[role=user].content[type=text].text",
        "tools[type=function].function.parameters",
        "response_format[type=json_schema].json_schema.schema",
    } <= paths
