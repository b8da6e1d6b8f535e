"""From a step's arrays on the host to tensors on the device, by one copy that nobody waits for.

The arrays lie one after another, each at a place that depends on the lengths before it alone. So steps of one graph's
size always find theirs at the same addresses, and what is copied is no more than what the step has:

    host    [ token_ids | positions | ... | tile_first | block tables ... ]      pinned; two, in turn, since the copy
                │                                            │                   of the step before may still be reading
    device  [ token_ids | positions | ... | tile_first | block tables ... ]      one: steps follow each other in the
            └─ places, multiples of ALIGN ─┘                                     stream, copies and kernels alike
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGN = 32
"""Numbers (of 4 bytes). Kernels are compiled anew for pointers that do not divide by 16 bytes; all of these do."""

Ints = NDArray[np.int32] | NDArray[np.int64]


class Limits(NamedTuple):
    """The largest step there may be."""

    max_sequences: int
    max_batch_tokens: int
    blocks_per_context: int
    """Block table of the longest sequence."""

    def capacity(self) -> int:
        """Numbers that such a step has, with the room between them."""
        tokens, sequences = max(self.max_batch_tokens, self.max_sequences), self.max_sequences
        of_tokens = [tokens] * 4  # ids, positions, slots, sampled rows
        of_sequences = [sequences, sequences + 1, sequences]
        of_tiles = [sequences] * 2 + [tokens] * 2  # decodes', prefill chunks'
        tables = sequences * self.blocks_per_context
        return total_of([*of_tokens, *of_sequences, *of_tiles, tables])


def places_of(lengths: Sequence[int]) -> list[int]:
    """Where arrays of these lengths begin, and where the next one would."""
    return list(accumulate((-(-length // ALIGN) * ALIGN for length in lengths), initial=0))


def total_of(lengths: Sequence[int]) -> int:
    """Numbers from the first one's first to the last one's last, and on to the next place."""
    return places_of(lengths)[-1]


def to_device(arrays: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Each as int32 there, in memory of their own. One copy for all of them: each costs as much as many bytes."""
    lengths = [len(array) for array in arrays]
    whole = np.zeros(total_of(lengths), np.int32)
    _fill(whole, arrays)
    return _views(sent(whole, device), lengths)


def sent(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` there, in memory of its own, once what is in the stream has run; waits for none of it.

    A copy out of memory that is not pinned waits for everything that the stream has to do, the steps before
    included. torch keeps the pinned copy until the device has read it.
    """
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device, copy=True)
    return host.pin_memory().to(device, non_blocking=True)


class Event(Protocol):
    """`torch.cuda.Event`, as far as it is used."""

    def record(self) -> object: ...

    def synchronize(self) -> object: ...


class Done:
    """The event of a device whose work is done when a call returns."""

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return


def new_event(device: torch.device) -> Event:
    """One that has happened until it is recorded."""
    if device.type == "cuda":
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        made: Event = event
        return made
    return Done()


class Staging:
    """Carries the arrays of one step after another to the same place. For one thread, and one stream."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """`capacity`: int32 numbers."""
        self.capacity = capacity
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._read = [new_event(device) for _ in self._hosts]
        """When the last copy out of each has ended."""
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._turn = 0

    def fits(self, arrays: Sequence[Ints]) -> bool:
        return total_of([len(array) for array in arrays]) <= self.capacity

    def stage(self, arrays: Sequence[Ints]) -> None:
        """Has them copied to their places, once what is in the stream has run. They must fit."""
        self._turn = 1 - self._turn
        host, read = self._hosts[self._turn], self._read[self._turn]
        read.synchronize()  # the copy of two steps ago: over long since, unless the host runs far ahead
        used = _fill(host.numpy(), arrays)
        self._device[:used].copy_(host[:used], non_blocking=True)
        read.record()

    def views(self, lengths: Sequence[int]) -> list[Tensor]:
        """The tensors in which arrays of these lengths come to lie: int32, on the device."""
        return _views(self._device, lengths)

    def open_views(self, lengths: Sequence[int]) -> list[Tensor]:
        """`views`, and one more of all that is behind them."""
        return [*_views(self._device, lengths), self._device[total_of(lengths) :]]


def _fill(into: NDArray[Any], arrays: Sequence[Ints]) -> int:
    """Puts each at its place; returns where the last one ends."""
    end = 0
    places = places_of([len(array) for array in arrays])
    for start, array in zip(places, arrays, strict=False):  # the last place is nobody's
        end = start + len(array)
        into[start:end] = array
    return end


def _views(whole: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    starts = places_of(lengths)
    return [whole[start : start + length] for start, length in zip(starts, lengths, strict=False)]
