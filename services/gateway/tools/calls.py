"""Tool calls as clients see them. Pure."""

import hashlib
from collections.abc import Sequence

import msgspec

from services.gateway.tools.parsers.scanner import Arguments, Begin, Event


class CallDelta(msgspec.Struct, frozen=True):
    """What is new of one call: its name, with its id, or more of its arguments, or both."""

    index: int
    id: str
    """Empty where the call has begun before, as the name is."""
    name: str
    arguments: str


def call_id(generation_id: str, index: int) -> str:
    """The id of call `index` of a choice. It follows from the generation alone: whoever shows the answer again
    shows the same."""
    digest = hashlib.blake2b(f"{generation_id}#{index}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"


class CallNumbering:
    """Gives the calls of one choice their indices and ids."""

    def __init__(self, generation_id: str, *, single: bool) -> None:
        """`single`: only the first call counts."""
        self._generation_id = generation_id
        self._single = single
        self.begun = 0
        """Calls so far, those left out included."""

    def deltas(self, events: Sequence[Event]) -> list[CallDelta]:
        """What `events` mean for clients, one delta a call."""
        found: dict[int, CallDelta] = {}
        for event in events:
            if isinstance(event, Begin):
                index, self.begun = self.begun, self.begun + 1
                found[index] = CallDelta(index, call_id(self._generation_id, index), event.name, "")
            elif isinstance(event, Arguments):
                index = self.begun - 1
                delta = found.get(index) or CallDelta(index, "", "", "")
                found[index] = msgspec.structs.replace(delta, arguments=delta.arguments + event.text)
        return [delta for delta in found.values() if not (self._single and delta.index)]
