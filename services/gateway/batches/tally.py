"""Which lines of a batch are done. Pure; a bit per line, whatever the lines say."""

from shared.messages.batches import Counts, LineResult, TokenCounts


class Tally:
    """Fed with results, some of them twice perhaps."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._completed = 0
        self._failed = 0
        self.usage = TokenCounts()
        self.size = 0
        """Bytes of all results."""

    def __contains__(self, line: int) -> bool:
        place = line >> 3
        return place < len(self._bits) and bool(self._bits[place] & (1 << (line & 7)))

    def add(self, result: LineResult) -> bool:
        """False when the line was done before: its first result counts."""
        if result.line in self:
            return False
        place = result.line >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(place + 1 - len(self._bits)))
        self._bits[place] |= 1 << (result.line & 7)
        if result.succeeded:
            self._completed += 1
        else:
            self._failed += 1
        self.usage = self.usage.plus(result.usage)
        self.size += len(result.text) or result.size
        return True

    def counts(self, total: int) -> Counts:
        """Of `total` requests."""
        return Counts(total, self._completed, self._failed)

    @property
    def done(self) -> int:
        """Lines that have a result."""
        return self._completed + self._failed
