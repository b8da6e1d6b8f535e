"""What the event loop does for one connection's frames: one account, which every kind of frame is charged to. Pure.

A unit is what the cheapest frame costs, about a microsecond. Whoever reads frames stops after `TURN`, so that other
connections have their turns, and ends the connection once its budget is exhausted.
"""

TURN = 1_000  # work for one connection in one turn of the event loop


class WorkBudget:
    """Of one connection."""

    __slots__ = ("limit", "per_second", "spent")

    def __init__(self, limit: int) -> None:
        """`limit`: work beyond which the connection is to end."""
        self.limit = limit
        self.per_second = limit // 10  # work that is forgiven each second
        self.spent = 0

    def charge(self, work: int) -> None:
        self.spent += work

    def refund(self, work: int) -> None:
        """What was paid too much, or was earned; nothing is saved up for later."""
        self.spent = max(0, self.spent - work)
