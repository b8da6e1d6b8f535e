"""When a rank asks for mapped KV blocks ahead of their use (`native/fetch.h`), and how fast their disk gives them.

Asking for a page that is in memory costs a microsecond, and a step may read tens of thousands of them. So nothing is
asked for while nothing was read from disk: then the system has kept all that was used. The first step that waits for
page faults is the last one that does so unprepared.
"""

import os
import resource

from services.executor.cpu.weight_streaming import Extent, measure_rate
from services.executor.kv_cache.block_memory import MappedBlockFile

QUIET_STEPS = 64  # steps that ask behind the last one in which something was read
_NUMBERS = 255  # that a step has, as the kernels note them in a byte
_MEASURED_BYTES = 32 << 20  # of a file, at most


class FetchSteps:
    """Numbers the steps that ask for blocks ahead. Pure."""

    def __init__(self) -> None:
        self._read = 0
        self._left = 0
        self._number = 0

    def next(self, read: int) -> int:
        """`read`: how much the process has read from disks so far, in any unit. Returns the number of the step that
        comes: 1 to 255, one more than the last one's; 0: it asks for nothing."""
        if read > self._read:
            self._left = QUIET_STEPS
        self._read = read
        if not self._left:
            return 0
        self._left -= 1
        self._number = self._number % _NUMBERS + 1
        return self._number


def disk_reads() -> int:
    """How much this process has read from disks, as page faults or ahead of them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def measure_disk(file: MappedBlockFile) -> float:
    """Bytes a second that the disk gives of a new file, one part behind the other; 0: it could not be measured. What is
    read must have been written: the zeros that the file has."""
    size = min(_MEASURED_BYTES, file.content.nbytes)
    try:
        os.pwrite(file.fd, bytes(size), 0)
        file.drop()
    except OSError:
        return 0.0
    rate = measure_rate(file.fd, [Extent(0, size)])
    file.drop()
    return rate
