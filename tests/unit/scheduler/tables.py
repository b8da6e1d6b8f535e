"""Tables of groups for scheduler tests."""

from hypothesis import strategies as st

from services.scheduler.groups import Group, GroupTable
from shared.messages import GroupLoad, GroupStatus

STATES: list[GroupStatus] = ["starting", "ready", "busy", "hung", "draining", "gone"]
SUSPECT = 1.0
FREE = GroupLoad(free_blocks=100, total_blocks=100)

loads = st.builds(
    GroupLoad,
    running=st.integers(0, 64),
    waiting=st.integers(0, 64),
    waiting_tokens=st.integers(0, 100_000),
    free_blocks=st.integers(0, 100),
    total_blocks=st.just(100),
    slots=st.sampled_from([0, 1, 16, 64, 128]),
    step_seconds=st.sampled_from([0.0, 0.005, 0.1]),
    prompt_tokens_per_second=st.sampled_from([0.0, 500.0, 50_000.0]),
)


def table_of(*records: object) -> GroupTable:
    table = GroupTable(SUSPECT)
    for record in records:
        table.record(record)  # type: ignore[arg-type]
    return table


def known(table: GroupTable, name: str) -> Group:
    """A group that is in the table."""
    found = table.get(name)
    assert found is not None
    return found
