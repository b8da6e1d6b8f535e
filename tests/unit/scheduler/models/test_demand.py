"""What is asked of each model: counted once, forgotten when its reporter is silent, bounded."""

from services.scheduler.models.demand import CLEARED, KEPT, MAX_REPORTERS, ConcurrencyEstimator, Demand, DemandTracker
from services.scheduler.models.lease import LeaseWatch
from shared.messages import ModelDemand, SchedulerDemand, WaitingModel
from shared.messages.registry import MAX_MODELS


def said(scheduler: str, model: str = "m", **fields: float) -> SchedulerDemand:
    return SchedulerDemand(scheduler, [WaitingModel(model, **fields)])  # type: ignore[arg-type]


def test_schedulers_and_gateways_are_added_up() -> None:
    tracker = DemandTracker()
    tracker.report(said("s1", waiting=2, oldest=3.0, arrived=5, idle=1.0), 100.0)
    tracker.report(said("s2", waiting=1, oldest=8.0, arrived=1, idle=8.0), 100.0)
    tracker.on_held(ModelDemand("m", "g1", 4), 100.0)
    tracker.on_held(ModelDemand("m", "g1", 5), 101.0)
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
    tracker.on_held(ModelDemand("other", "g", 1), 100.0)
    assert tracker.all(100.0 + KEPT + 1)["m"].waiting == 0
    tracker.on_held(ModelDemand("m", "g", 0), 100.0)
    tracker.keep({"m"}, 100.0)
    assert set(tracker.all(100.0)) == {"m"}
    tracker.keep({}, 200.0)
    assert tracker.all(200.0) == {}


def test_it_is_bounded() -> None:
    tracker = DemandTracker()
    for number in range(MAX_REPORTERS + 5):
        tracker.on_held(ModelDemand("m", f"g{number}", 1), 1.0)
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


class Flow:
    """Requests of one model that take `seconds` each, in a second of which `rate` come and all have places."""

    def __init__(self, seconds: int) -> None:
        self.estimator = ConcurrencyEstimator()
        self.seconds = seconds
        self.now = self.arrived = self.waiting = 0
        self.came: list[int] = []

    def pass_second(self, rate: int, *, places: bool = True) -> float:
        self.now += 1
        self.arrived += rate
        self.came.append(rate if places else 0)
        self.waiting += 0 if places else rate
        inside = sum(self.came[-self.seconds :])
        demand = Demand(self.waiting, arrived=self.arrived, latest=float(rate))
        return self.estimator.estimate("m", inside, demand, float(self.now))


def test_what_is_there_is_expected_until_requests_have_ended() -> None:
    flow = Flow(20)
    assert [flow.pass_second(10) for _ in range(20)] == [10.0 * second for second in range(1, 21)]


def test_a_jump_is_expected_to_need_what_the_requests_take_each() -> None:
    flow = Flow(20)
    for _ in range(200):
        level = flow.pass_second(10)
    assert level == 200, "as many as there are: chance is no growth"
    jumped = flow.pass_second(200, places=False)
    assert 3000 < jumped < 4100, "200 a second that take 20 s each, at once"
    for _ in range(29):
        waited = flow.pass_second(200, places=False)
    assert flow.waiting == 6000
    assert waited < jumped + 6000 * 25 / CLEARED, "nor as many replicas as would serve the backlog at once"


def test_estimates_of_models_of_no_registry_are_forgotten() -> None:
    flow = Flow(5)
    for _ in range(100):
        flow.pass_second(10)
    flow.estimator.keep({"other"})
    assert flow.pass_second(100, places=False) == 50 - 10 + 100
