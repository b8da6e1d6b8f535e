"""A trace as text."""

from benchmarks.waterfall import Received, Traces, waterfall


def span(name: str, parent: str, begin: int, end: int, **attributes: object) -> Received:
    """Times in milliseconds; its id is its name."""
    resource = {"service.name": "s", "service.instance.id": "gateway-0"}
    failed = "error" in attributes
    found = {f"ryzanstein.{key}": value for key, value in attributes.items()}
    return Received(
        "s",
        resource,
        name,
        1,
        "t",
        name,
        parent,
        found,
        [],
        [],
        begin * 10**6,
        end * 10**6,
        failed,
        "",
    )


def test_a_row_for_each_span_below_its_parent() -> None:
    spans = [
        span("late", "root", 30, 40, steps=3, longest_step_seconds=0.25),
        span("root", "client", 0, 40),
        span("inner", "early", 10, 20, error=1),
        span("early", "root", 0, 20),
        span("orphan", "gone", 20, 40),
    ]
    head, *rows = waterfall(spans).splitlines()
    assert head == "trace t: 40 ms"
    bar = "=" * 20
    assert [row.partition("|")[0].rstrip() for row in rows] == [
        f"{name:38} gateway-0" for name in ("root", "  early", "    inner", "  late", "orphan")
    ]
    assert [row.split("|")[1].rstrip() for row in rows] == [
        "=" * 40,
        bar,
        f"{' ' * 10}{'x' * 10}",
        f"{' ' * 30}{'=' * 10}",
        f"{' ' * 20}{bar}",
    ]
    assert rows[3].endswith("    30.0      10.0  steps=3 longest_step_seconds=0.250")


def test_a_trace_is_printed_once_nothing_more_comes() -> None:
    traces = Traces()
    traces.take([span("a", "", 0, 1)])
    assert traces.whole(quiet=3600) == []
    traces.take([span("b", "a", 0, 1)])
    assert [[one.name for one in trace] for trace in traces.whole(quiet=0)] == [["a", "b"]]
    assert traces.whole(quiet=0) == []
    traces.take([span("part", "whole", 0, 1)])
    assert traces.whole(quiet=0) == [], "its beginning has not come"
    traces.take([span("whole", "", 0, 1)])
    assert len(traces.whole(quiet=0)[0]) == 2
