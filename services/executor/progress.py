"""A counter that grows with each layer that a rank computes: its sign of life within a step.

It lies in memory that another process may read, and native code counts in it by its address: a call back
into Python would wait for whatever else the interpreter does, once per layer. GPUs have a counter of their own:
`gpu/device_progress.py`.
"""

import ctypes


class Progress:
    """One aligned 64-bit integer of `words` (format `q`), with one writer at a time."""

    def __init__(self, words: memoryview, index: int = 0) -> None:
        """`words` must stay where they are as long as `address` is in use."""
        self._words = words
        self._index = index

    @classmethod
    def unread(cls) -> "Progress":
        """For steps that nobody watches."""
        return cls(memoryview(bytearray(8)).cast("q"))

    @property
    def count(self) -> int:
        """Layers so far."""
        value: int = self._words[self._index]
        return value

    @property
    def address(self) -> int:
        """Of the integer, for native code."""
        return ctypes.addressof(ctypes.c_int64.from_buffer(self._words, self._index * self._words.itemsize))

    def tick(self) -> None:
        """A layer was computed."""
        self._words[self._index] += 1
