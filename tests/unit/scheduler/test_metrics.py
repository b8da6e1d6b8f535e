"""Labels of a scheduler's metrics: few, whatever is asked for, and none for groups that are gone."""

from services.scheduler.groups import State
from services.scheduler.metrics import (
    KEPT,
    MOST_MODELS,
    OTHER_MODELS,
    GroupCollector,
    WaitingCollector,
    code_label,
    vllm_aliases,
)
from shared.messages import LANES, Lane


def waiting(collector: WaitingCollector) -> dict[tuple[str, str], float]:
    (family,) = collector.collect()
    return {(sample.labels["model"], sample.labels["lane"]): sample.value for sample in family.samples}


def test_a_queue_that_is_empty_again_is_told_as_0() -> None:
    queue: dict[tuple[str, Lane], int] = {("asleep", "interactive"): 3}
    collector = WaitingCollector(lambda: queue, lambda: ["served"])
    assert waiting(collector) == {
        (model, lane): 3 if (model, lane) == ("asleep", "interactive") else 0
        for model in ("served", "asleep")
        for lane in LANES
    }
    queue.clear()
    assert set(waiting(collector).values()) == {0}
    (alias,) = vllm_aliases(collector).collect()
    assert {sample.labels["model_name"] for sample in alias.samples} == {"served", "asleep"}


def test_models_beyond_the_first_are_told_together() -> None:
    queue: dict[tuple[str, Lane], int] = {}
    collector = WaitingCollector(lambda: queue, list)
    for number in range(10_000):
        queue[f"made-up-{number}", "batch"] = 1
    found = waiting(collector)
    assert len(found) == MOST_MODELS * len(LANES) + len(LANES)
    assert found[OTHER_MODELS, "batch"] == 10_000 - MOST_MODELS
    assert sum(found.values()) == 10_000


def groups(collector: GroupCollector) -> tuple[set[str], dict[str, float]]:
    states, dispatched = collector.collect()
    return (
        {sample.labels["group"] for sample in states.samples},
        {sample.labels["group"]: sample.value for sample in dispatched.samples},
    )


def test_a_group_that_is_gone_disappears_after_a_time() -> None:
    now, known = [0.0], dict[str, State](a="closed", b="open")
    collector = GroupCollector(known.items, lambda: now[0])
    for group in "aab":
        collector.dispatched(group)
    assert groups(collector) == ({"a", "b"}, {"a": 2, "b": 1})
    del known["a"]
    assert groups(collector) == ({"b"}, {"a": 2, "b": 1}), "its last figures can still be read"
    now[0] = KEPT / 2
    known["a"] = "closed"
    assert groups(collector) == ({"a", "b"}, {"a": 2, "b": 1}), "it is back"
    del known["a"]
    assert groups(collector)[1] == {"a": 2, "b": 1}
    now[0] += KEPT - 1
    assert groups(collector)[1] == {"a": 2, "b": 1}
    now[0] += 1
    assert groups(collector) == ({"b"}, {"b": 1})


def test_codes_that_nobody_knows_share_a_label() -> None:
    assert code_label("queue_full") == "queue_full"
    assert {code_label(f"made-up-{number}") for number in range(10_000)} == {"internal_error"}
