"""How many lines a batch may have under way. Pure.

    places of the model's groups ──▶ at most the setting ──▶ shared out among the batches that run here

More would only wait in the queue: the scheduler gives batch work to groups with idle places alone. A group
whose places are not known counts as `UNKNOWN`.
"""

UNKNOWN = 16
LEAST = 2


def room(places: int, parallelism: int, batches: int) -> int:
    """`places`: of the model's groups; `batches`: that run in this gateway, at least 1."""
    wanted = min(places or UNKNOWN, parallelism)
    return max(min(LEAST, parallelism), -(-wanted // max(1, batches)))


def backoff(tries: int) -> float:
    """Seconds to wait before the next try, after `tries` that failed: 0.25, 0.5, 1 ... 60."""
    return float(min(60.0, 0.25 * 2 ** min(tries, 10)))
