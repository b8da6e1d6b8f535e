"""Who is let go for what the gateway holds for them."""

from services.gateway.server.connections import ConnectionLimiter
from services.gateway.server.held import HeldWatch, UnreadAnswers, excess


class Client:
    """A connection."""

    def __init__(self, owed: int = 0, arriving: int = 0) -> None:
        self.owed = owed
        self.arriving = arriving
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_who_takes_nothing_for_too_long_is_stuck_and_who_takes_a_little_is_slow() -> None:
    answers = UnreadAnswers[str](60.0)
    for second in range(100):
        owed = {"stuck": 500, "slow": 500_000 - second // 50, "late": 1} | ({} if second < 80 else {"new": 9})
        if second == 50:
            del owed["late"]
        found = answers.stuck(owed, float(second))
        assert found == (["stuck"] if second > 60 else []), second


def test_beyond_the_limit_who_was_left_most_goes_first_and_no_more_than_must() -> None:
    assert excess({"a": 40, "b": 60}, 100) == []
    assert excess({"a": 40, "b": 61}, 100) == ["b"]
    assert excess({"a": 150, "b": 90, "c": 60, "d": 20}, 100) == ["a", "b"]


def test_connections_of_all_ports_count_together() -> None:
    refused: list[tuple[str, str]] = []
    door = ConnectionLimiter(10, refused=lambda port, reason: refused.append((port, reason)))
    rest, ops, grpc, idle = Client(30), Client(20), Client(80), Client()
    door.http |= {rest, idle}
    door.ops.add(ops)
    door.grpc.add(grpc)
    watch = HeldWatch(door, owed=100, arriving=100, seconds=60.0)
    watch.look(0.0)
    assert [client.aborted for client in (rest, ops, grpc, idle)] == [False, False, True, False]
    assert (watch.total("http", "owed"), watch.total("grpc", "owed"), refused) == (50, 80, [("grpc", "unread")])
    door.grpc.clear()
    watch.look(61.0)
    assert [client.aborted for client in (rest, ops, idle)] == [True, True, False]
    assert refused[1:] == [("http", "unread")] * 2


def test_grpc_connections_see_to_their_own_time() -> None:
    door = ConnectionLimiter(10)
    client = Client(80)
    door.grpc.add(client)
    watch = HeldWatch(door, owed=100, arriving=100, seconds=60.0)
    for second in (0.0, 61.0, 200.0):
        watch.look(second)
    assert not client.aborted


def test_requests_that_have_not_come_whole_count_together_too() -> None:
    refused: list[tuple[str, str]] = []
    door = ConnectionLimiter(10, refused=lambda port, reason: refused.append((port, reason)))
    rest, grpc, large = Client(arriving=30), Client(arriving=60), Client(owed=90, arriving=80)
    door.http |= {rest, large}
    door.grpc.add(grpc)
    watch = HeldWatch(door, owed=100, arriving=100, seconds=60.0)
    watch.look(0.0)
    assert [client.aborted for client in (rest, grpc, large)] == [False, False, True]
    assert (watch.total("http", "arriving"), watch.total("grpc", "arriving")) == (110, 60)
    assert refused == [("http", "incomplete")]
