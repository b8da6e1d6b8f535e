"""Which generations have ended lately, so that a redelivered request is not computed again."""

from collections import OrderedDict

from shared.messages import GenerationRequest


class RecentlyEnded:
    """The last attempts of the `capacity` generations that ended last."""

    def __init__(self, capacity: int = 4096) -> None:
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._capacity = capacity

    def add(self, request: GenerationRequest) -> None:
        """This attempt is over; the oldest generation is forgotten when there are too many."""
        self._attempts[request.generation_id] = request.attempt
        self._attempts.move_to_end(request.generation_id)
        if len(self._attempts) > self._capacity:
            self._attempts.popitem(last=False)

    def attempt(self, generation_id: str) -> int:
        """The attempt that ended; -1 for a generation that is not known."""
        return self._attempts.get(generation_id, -1)

    def __len__(self) -> int:
        return len(self._attempts)
