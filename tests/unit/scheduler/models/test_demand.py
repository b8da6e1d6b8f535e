"""What is asked of each model: counted once, forgotten when its reporter is silent, bounded."""

from services.scheduler.models.demand import KEPT, LONGEST_FORECAST, MAX_REPORTERS, DemandTracker, Growth
from services.scheduler.models.lease import LeaseWatch
from shared.messages import ModelDemand, SchedulerDemand, WaitingModel
from shared.messages.registry import MAX_MODELS


def said(scheduler: str, model: str = "m", **fields: float) -> SchedulerDemand:
    return SchedulerDemand(scheduler, [WaitingModel(model, **fields)])  # type: ignore[arg-type]


def test_schedulers_and_gateways_are_added_up() -> None:
    tracker = DemandTracker()
    tracker.report(said("s1", waiting=2, oldest=3.0, arrived=5, idle=1.0), 100.0)
    tracker.report(said("s2", waiting=1, oldest=8.0, arrived=1, idle=8.0), 100.0)
    tracker.held(ModelDemand("m", "g1", 4), 100.0)
    tracker.held(ModelDemand("m", "g1", 5), 101.0)
    demand = tracker.all(101.0)["m"]
    assert (demand.waiting, demand.since, demand.last) == (8, 92.0, 101.0)


def test_what_was_counted_before_is_no_news() -> None:
    tracker = DemandTracker()
    tracker.report(said("s1", arrived=1000, idle=50.0), 100.0)
    assert tracker.all(100.0)["m"].rate == 0
    assert tracker.all(100.0)["m"].last == 50.0
    tracker.report(said("s1", arrived=1060), 101.0)
    assert 0.9 < tracker.all(101.0)["m"].rate < 1.1
    tracker.report(said("s1", arrived=5), 102.0)  # it has started anew
    assert tracker.all(102.0)["m"].rate < 1.1


def test_who_is_silent_and_models_of_no_registry_are_forgotten() -> None:
    tracker = DemandTracker()
    tracker.report(said("s1", waiting=2, arrived=2), 100.0)
    tracker.held(ModelDemand("other", "g", 1), 100.0)
    assert tracker.all(100.0 + KEPT + 1)["m"].waiting == 0
    tracker.held(ModelDemand("m", "g", 0), 100.0)
    tracker.keep({"m"}, 100.0)
    assert set(tracker.all(100.0)) == {"m"}
    tracker.keep({}, 200.0)
    assert tracker.all(200.0) == {}


def test_it_is_bounded() -> None:
    tracker = DemandTracker()
    for number in range(MAX_REPORTERS + 5):
        tracker.held(ModelDemand("m", f"g{number}", 1), 1.0)
    assert tracker.all(1.0)["m"].waiting == MAX_REPORTERS
    tracker = DemandTracker()
    for number in range(MAX_MODELS + 5):
        tracker.report(said("s", f"m{number}", waiting=1, arrived=1), 1.0)
    assert len(tracker.all(1.0)) == MAX_MODELS


def test_a_lease_expires_by_standing_still_before_its_watcher() -> None:
    watch = LeaseWatch(4.0)
    assert not watch.expired(7, 100.0)
    assert not watch.expired(7, 103.9)
    assert watch.expired(7, 104.0)
    assert not watch.expired(8, 105.0)
    watch.forget()
    assert not watch.expired(8, 200.0)


def test_growth_is_expected_to_go_on_and_chance_is_no_growth() -> None:
    growth = Growth()
    assert growth.expect("m", 100, 30.0, 0.0) == 100, "nothing is known of what was before"
    for second in range(1, 60):  # as many as ever, more or less
        assert growth.expect("m", 100 + second % 5, 30.0, float(second)) == 100 + second % 5
    expected = [growth.expect("m", 100 + 50 * second, 30.0, 60.0 + second) for second in range(1, 31)]
    requests = 100 + 50 * 30
    assert requests + 30 * 20 < expected[-1] < requests + 30 * 51, "50 a second"
    assert growth.expect("m", requests, 1e9, 90.0) < requests + 51 * LONGEST_FORECAST
    growth.keep({"other"})
    assert growth.expect("m", 7, 30.0, 100.0) == 7
