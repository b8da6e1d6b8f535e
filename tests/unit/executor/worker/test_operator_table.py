"""Every nanosecond of a thread belongs to one operator: the innermost."""

from hypothesis import given
from hypothesis import strategies as st

from services.executor.worker.profiler import Range, operator_table


def test_time_within_another_operator_is_not_its_own() -> None:
    ranges = [
        Range("compute", 0, 10_000, 1),
        Range("mm", 1_000, 4_000, 1),
        Range("mm", 5_000, 6_000, 1),
        Range("copy", 1_500, 2_000, 1),
        Range("compute", 0, 2_000, 2),
        Range("kernel", 0, 7_000, 9, on_device=True),
        Range("kernel", 100, 7_100, 9, on_device=True),
    ]
    rows = {row.name: (row.calls, row.self_us, row.total_us, row.device_us) for row in operator_table(ranges, 9)}
    assert rows == {
        "kernel": (2, 0.0, 0.0, 14.0),
        "compute": (2, 8.0, 12.0, 0.0),
        "mm": (2, 3.5, 4.0, 0.0),
        "copy": (1, 0.5, 0.5, 0.0),
    }
    assert [row.name for row in operator_table(ranges, 2)] == ["kernel", "compute"]


def test_an_operator_within_itself_counts_once_in_its_total() -> None:
    [row] = operator_table([Range("to", 0, 5_000, 1), Range("to", 1_000, 2_000, 1)], 9)
    assert (row.calls, row.self_us, row.total_us) == (2, 5.0, 5.0)


def test_an_allocation_belongs_to_the_innermost_operator_of_its_thread() -> None:
    ranges = [
        Range("compute", 0, 10_000, 1),
        Range("mm", 1_000, 4_000, 1),
        Range("compute", 0, 10_000, 2),
        Range("[memory]", 2_000, 2_000, 1, allocated=4096),
        Range("[memory]", 5_000, 5_000, 1, allocated=-1024),
        Range("[memory]", 2_000, 2_000, 3, allocated=7),
    ]
    table = operator_table(ranges, 9)
    assert {row.name: row.memory_bytes for row in table} == {"compute": -1024, "mm": 4096}


nested = st.recursive(st.integers(1, 50), lambda inner: st.lists(inner, min_size=1, max_size=4), max_leaves=30)


@given(nested, st.randoms())
def test_own_times_add_up_to_the_whole(tree: object, order: object) -> None:
    ranges: list[Range] = []

    def lay(node: object, start: int, depth: int) -> int:
        end = start + node if isinstance(node, int) else start
        if isinstance(node, list):
            for child in node:
                end = lay(child, end, depth + 1)
        ranges.append(Range(f"level-{depth}", start, end, 1))
        return end

    whole = lay(tree, 0, 0)
    order.shuffle(ranges)  # type: ignore[attr-defined]
    table = operator_table(ranges, 99)
    assert round(sum(row.self_us for row in table) * 1e3) == whole
    assert all(0 <= row.self_us <= row.total_us for row in table)
