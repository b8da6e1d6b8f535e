"""Who is let go for what they have not read."""

from services.gateway.server.connections import Door
from services.gateway.server.unread import UnreadAnswers, UnreadWatch


class Client:
    """A connection."""

    def __init__(self, owed: int = 0) -> None:
        self.owed = owed
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


def test_who_takes_nothing_for_too_long_is_stuck_and_who_takes_a_little_is_slow() -> None:
    answers = UnreadAnswers[str](1 << 30, 60.0)
    for second in range(100):
        owed = {"stuck": 500, "slow": 500_000 - second // 50, "late": 1} | ({} if second < 80 else {"new": 9})
        if second == 50:
            del owed["late"]
        found = answers.stuck(owed, float(second))
        assert found == (["stuck"] if second > 60 else []), second


def test_beyond_the_limit_who_was_left_most_goes_first_and_no_more_than_must() -> None:
    answers = UnreadAnswers[str](100, 60.0)
    assert answers.excess({"a": 40, "b": 60}) == []
    assert answers.excess({"a": 40, "b": 61}) == ["b"]
    assert answers.excess({"a": 150, "b": 90, "c": 60, "d": 20}) == ["a", "b"]


def test_connections_of_all_ports_count_together() -> None:
    refused: list[tuple[str, str]] = []
    door = Door(10, refused=lambda port, reason: refused.append((port, reason)))
    rest, ops, grpc, idle = Client(30), Client(20), Client(80), Client()
    door.http |= {rest, idle}
    door.ops.add(ops)
    door.grpc.add(grpc)
    watch = UnreadWatch(door, limit=100, seconds=60.0)
    watch.look(0.0)
    assert [client.aborted for client in (rest, ops, grpc, idle)] == [False, False, True, False]
    assert (watch.total("http"), watch.total("grpc"), refused) == (50, 80, [("grpc", "unread")])
    door.grpc.clear()
    watch.look(61.0)
    assert [client.aborted for client in (rest, ops, idle)] == [True, True, False]
    assert refused[1:] == [("http", "unread")] * 2


def test_grpc_connections_see_to_their_own_time() -> None:
    door = Door(10)
    client = Client(80)
    door.grpc.add(client)
    watch = UnreadWatch(door, limit=100, seconds=60.0)
    for second in (0.0, 61.0, 200.0):
        watch.look(second)
    assert not client.aborted
