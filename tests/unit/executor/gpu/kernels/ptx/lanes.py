"""Registers of all threads of a program: NumPy arrays of their bits."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
HALVES = {"f16x2": "f16", "bf16x2": "bf16"}


def bits_of(kind: str) -> int:
    """Of a type: `u32`, `bf16`, `f16x2`."""
    found = re.fullmatch(r"[a-z]+(\d+)(?:x(\d))?", kind)
    assert found is not None, kind
    return int(found[1]) * int(found[2] or 1)


def to_numbers(bits: Array, kind: str) -> Array:
    """`bits` as numbers of `kind`: those of 16 bits with a point as float32, which holds them exactly."""
    width = bits_of(kind)
    bits = bits if bits.dtype == UNSIGNED[width] else bits.astype(UNSIGNED[width])
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind[0] == "f":
        return bits.view(np.float32 if width == 32 else np.float64)
    return bits.view(SIGNED[width]) if kind[0] == "s" else bits


def to_bits(numbers: Array, kind: str) -> Array:
    """Numbers, rounded to `kind` to the nearest, ties to even (section "cvt", .rn), as bits."""
    width = bits_of(kind)
    if kind == "bf16":
        return _to_bf16(numbers)
    if kind == "f16":
        with np.errstate(over="ignore"):
            halves = numbers.astype(np.float16)
        return np.where(np.isnan(numbers), np.uint16(0x7FFF), halves.view(np.uint16))
    if kind[0] == "f":
        with np.errstate(over="ignore", under="ignore"):
            return numbers.astype(np.float32 if width == 32 else np.float64).view(UNSIGNED[width])
    if kind in ("s8", "s16"):
        # A register that is wider gets the sign (section "Operand Size Exceeding Instruction-Type Size").
        return numbers.astype(SIGNED[width]).astype(np.int32).view(np.uint32)
    return numbers.astype(UNSIGNED[width])


def _to_bf16(numbers: Array) -> Array:
    assert numbers.dtype == np.float32
    bits = numbers.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), rounded)


class Lanes:
    """The threads of a program."""

    def __init__(self, count: int, names: dict[str, int]) -> None:
        """`names`: special registers, and addresses of what has a name."""
        self.count = count
        self.guard: Array | None = None
        """bool: which threads do the present instruction; None: all."""
        self._registers: dict[str, Array] = {"%tid.x": np.arange(count, dtype=np.uint32)}
        for name, value in names.items():
            self._registers[name] = np.full(count, value, np.uint64 if value >> 32 else np.uint32)
        for zero in ("%tid.y", "%tid.z"):
            self._registers[zero] = np.zeros(count, np.uint32)
        self._registers["%laneid"] = self._registers["%tid.x"] % np.uint32(32)

    def bits(self, name: str, width: int) -> Array:
        """What a register, or a number in the text, holds."""
        found = self._registers.get(name)
        if found is None:
            assert not name.startswith("%"), f"{name} is read before it is written"
            found = np.full(self.count, _literal(name), np.uint64)
            self._registers[name] = found
        return found if found.dtype == UNSIGNED[width] else found.astype(UNSIGNED[width])

    def read(self, name: str, kind: str) -> Array:
        return to_numbers(self.bits(name, bits_of(kind)), kind)

    def truth(self, name: str) -> Array:
        """Of a predicate."""
        if name.startswith("!"):
            return ~self.truth(name[1:])
        if name in ("0", "1", "-1"):
            return np.full(self.count, name != "0")
        return self._registers[name]

    def put(self, name: str, bits: Array) -> None:
        """Into the register `name`, in the threads that the guard lets."""
        if name == "_":
            return
        if self.guard is not None:
            old = self._registers.get(name)
            old = np.zeros(self.count, bits.dtype) if old is None else old.astype(bits.dtype)
            bits = np.where(self.guard, bits, old)
        self._registers[name] = bits

    def write(self, name: str, numbers: Array, kind: str) -> None:
        self.put(name, to_bits(numbers, kind))

    def holds(self, name: str) -> bool:
        return name in self._registers


def _literal(text: str) -> int:
    """Section "Constants"."""
    if text.startswith(("0f", "0F", "0d", "0D")):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF
