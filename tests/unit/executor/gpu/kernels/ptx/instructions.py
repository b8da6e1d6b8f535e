"""What statements do. Each takes the program and the statement; the section of PTX ISA is the instruction's name."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.unit.executor.gpu.kernels.ptx.lanes import (
    HALVES,
    SIGNED,
    UNSIGNED,
    Array,
    bits_of,
    to_bits,
    to_numbers,
)
from tests.unit.executor.gpu.kernels.ptx.text import Statement, inside

if TYPE_CHECKING:
    from tests.unit.executor.gpu.kernels.ptx.machine import Program

Does = Callable[["Program", Statement], None]
_E4M3 = (
    torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy()
)
_E4M3 = _E4M3.view(np.uint16)
_NOT_A_NUMBER = np.uint16(0x7FFF)
_WARP = 32


def _wide(numbers: Array) -> Array:
    return numbers.astype(np.float64) if numbers.dtype.kind == "f" else numbers


def _divided(a: Array, b: Array) -> Array:
    return (a / b).astype(a.dtype)


OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divided,
    "min": lambda a, b: (
        np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)
    ),  # of NaN and a number: the number
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    "fma": lambda a, b, c: (_wide(a) * _wide(b) + _wide(c)).astype(a.dtype),
    "mad": lambda a, b, c: a * b + c,
    "abs": np.abs,
    "neg": lambda a: -a,
    "ex2": lambda a: np.exp2(_wide(a)).astype(a.dtype),
    "lg2": lambda a: np.log2(_wide(a)).astype(a.dtype),
    "rcp": lambda a: (1.0 / _wide(a)).astype(a.dtype),
    "rsqrt": lambda a: (1.0 / np.sqrt(_wide(a))).astype(a.dtype),
    "sqrt": lambda a: np.sqrt(_wide(a)).astype(a.dtype),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
}


def arithmetic(program: "Program", it: Statement) -> None:
    """Any of `OPERATIONS`, on numbers, pairs of halves, bits or predicates."""
    lanes, kind, operation = program.lanes, it.opcode[-1], OPERATIONS[it.opcode[0]]
    target, *sources = it.operands
    with np.errstate(all="ignore"):
        if kind == "pred":
            lanes.put(target, operation(*(lanes.truth(one) for one in sources)))
        elif "wide" in it.opcode:
            _widening(program, it, operation)
        elif kind in HALVES:
            both = [lanes.bits(one, 32) for one in sources]
            low = operation(*(to_numbers(one.astype(np.uint16), HALVES[kind]) for one in both))
            high = operation(*(to_numbers((one >> 16).astype(np.uint16), HALVES[kind]) for one in both))
            lanes.put(target, _paired(to_bits(low, HALVES[kind]), to_bits(high, HALVES[kind])))
        else:
            assert "hi" not in it.opcode, it.text
            result = operation(*(lanes.read(one, kind) for one in sources))
            lanes.write(target, _roughly(result) if {"approx", "full"} & set(it.opcode) else result, kind)


def _roughly(result: Array) -> Array:
    """What an approximation may give as well: every other number is a unit in the last place higher."""
    odd = (result.view(UNSIGNED[8 * result.itemsize]) & 1) == 1
    return np.where(odd & np.isfinite(result), np.nextafter(result, np.inf, dtype=result.dtype), result)


def _widening(program: "Program", it: Statement, operation: Callable[..., Array]) -> None:
    lanes, kind = program.lanes, it.opcode[-1]
    wider = f"{kind[0]}{2 * bits_of(kind)}"
    a, b = (
        lanes.read(one, kind).astype(to_numbers(np.zeros(1, np.uint64), wider).dtype)
        for one in it.operands[1:3]
    )
    rest = [lanes.read(one, wider) for one in it.operands[3:]]
    lanes.write(it.operands[0], operation(a, b, *rest), wider)


def _paired(low: Array, high: Array) -> Array:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def move(program: "Program", it: Statement) -> None:
    """Also what packs registers into one of several times their size, and takes it apart: the first is the lowest."""
    lanes, (target, source) = program.lanes, it.operands
    if it.opcode[1] == "pred":
        lanes.put(target, lanes.truth(source))
        return
    width = bits_of(it.opcode[1])
    parts, targets = inside(source), inside(target)
    part = width // max(len(parts), len(targets))
    if len(targets) > 1:
        whole = lanes.bits(source, width)
        for at, name in enumerate(targets):
            lanes.put(name, (whole >> UNSIGNED[width](at * part)).astype(UNSIGNED[part]))
        return
    whole = np.zeros(lanes.count, UNSIGNED[width])
    for at, name in enumerate(parts):
        whole |= lanes.bits(name, part).astype(UNSIGNED[width]) << UNSIGNED[width](at * part)
    lanes.put(target, whole)


def shift(program: "Program", it: Statement) -> None:
    """By more than there are bits: all of them are gone, or the sign."""
    lanes, kind = program.lanes, it.opcode[-1]
    width = bits_of(kind)
    value, by = lanes.read(it.operands[1], kind), lanes.bits(it.operands[2], 32)
    far = by >= width
    by = np.minimum(by, width - 1).astype(value.dtype)
    moved = value << by if it.opcode[0] == "shl" else value >> by
    beyond = value >> np.array(width - 1, value.dtype) if kind[0] == "s" else np.zeros_like(value)
    lanes.write(it.operands[0], np.where(far, beyond, moved), kind)


def permute(program: "Program", it: Statement) -> None:
    """prmt.b32: each four bits choose one of the eight bytes of b a, and by the highest bit its sign alone."""
    assert it.opcode[1:] == ("b32",), it.text
    a, b, chosen = (program.lanes.bits(one, 32) for one in it.operands[1:])
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(a)
    for at in range(4):
        digit = (chosen >> np.uint32(4 * at)) & np.uint32(15)
        byte = ((both >> ((digit & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(
            np.uint32
        )
        byte = np.where(digit & 8, (byte >> 7) * np.uint32(255), byte)
        result |= byte << np.uint32(8 * at)
    program.lanes.put(it.operands[0], result)


def logic(program: "Program", it: Statement) -> None:
    """lop3.b32: a table of three bits."""
    a, b, c = (program.lanes.bits(one, 32) for one in it.operands[1:4])
    table, result = int(it.operands[4], 0), np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    program.lanes.put(it.operands[0], result)


def extract(program: "Program", it: Statement) -> None:
    """bfe, of fields that lie within the number."""
    lanes, kind = program.lanes, it.opcode[-1]
    at, length = int(it.operands[2], 0), int(it.operands[3], 0)
    value, unused = lanes.read(it.operands[1], kind), bits_of(kind) - length
    assert at <= unused
    lanes.write(
        it.operands[0], (value << np.array(unused - at, value.dtype)) >> np.array(unused, value.dtype), kind
    )


def count_bits(program: "Program", it: Statement) -> None:
    program.lanes.put(
        it.operands[0], np.bitwise_count(program.lanes.bits(it.operands[1], 32)).astype(np.uint32)
    )


def select(program: "Program", it: Statement) -> None:
    lanes, width = program.lanes, bits_of(it.opcode[-1])
    target, a, b, by = it.operands
    lanes.put(target, np.where(lanes.truth(by), lanes.bits(a, width), lanes.bits(b, width)))


_COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def compare(program: "Program", it: Statement) -> None:
    """setp: of numbers with a point, NaN is unequal to all and below none; with a u it is all of it."""
    assert len(it.opcode) == 3, it.text
    lanes, what, kind = program.lanes, it.opcode[1], it.opcode[2]
    a, b = (lanes.read(one, kind) for one in it.operands[1:])
    strange = (a != a) | (b != b)
    if what in ("num", "nan"):
        result = strange == (what == "nan")
    elif kind[0] == "f" or kind == "bf16":
        result = _COMPARED[what.removesuffix("u")](a, b)
        result = result | strange if what.endswith("u") and what != "u" else result & ~strange
    else:
        result = _COMPARED[what](a, b)
    lanes.put(it.operands[0], result)


def convert(program: "Program", it: Statement) -> None:
    """cvt."""
    lanes, into, of = program.lanes, it.opcode[-2], it.opcode[-1]
    target, *sources = it.operands
    rounding = [part for part in it.opcode[1:-2] if part in ("rn", "rzi", "rni")]
    if of == "e4m3x2":
        codes = lanes.bits(sources[0], 16)
        lanes.put(target, _paired(_E4M3_HALVES[codes & 255], _E4M3_HALVES[codes >> 8]))
    elif into in HALVES:
        high, low = (to_bits(lanes.read(one, of), HALVES[into]) for one in sources)
        lanes.put(target, _paired(low, high))
    elif into[0] in "us" and of[0] in "us":
        lanes.write(target, lanes.read(sources[0], of), into)
    elif into[0] in "us":
        _to_whole(program, target, lanes.read(sources[0], of), into, rounding[0])
    else:
        lanes.write(target, _widened(lanes.read(sources[0], of), into), into)


def _widened(numbers: Array, into: str) -> Array:
    return numbers.astype(np.float64 if into == "f64" else np.float32)


def _to_whole(program: "Program", target: str, numbers: Array, into: str, rounding: str) -> None:
    """Beyond the limits: the limits; NaN: 0."""
    whole = np.trunc(numbers) if rounding == "rzi" else np.rint(numbers)
    limits = np.iinfo((SIGNED if into[0] == "s" else UNSIGNED)[bits_of(into)])
    whole = np.clip(np.nan_to_num(whole.astype(np.float64), nan=0.0), limits.min, limits.max)
    program.lanes.write(target, whole.astype(np.int64), into)


_E4M3_HALVES = np.where((np.arange(256) & 0x7F) == 0x7F, _NOT_A_NUMBER, _E4M3)


def exchange(program: "Program", it: Statement) -> None:
    """shfl.sync."""
    lanes = program.lanes
    targets = it.operands[0].split("|")
    value = lanes.bits(it.operands[1], 32)
    lane = np.arange(lanes.count) % _WARP
    by, limits = (lanes.bits(one, 32).astype(np.int64) for one in it.operands[2:4])
    by, segments = by & 31, limits >> 8 & 31
    last = (lane & segments) | (limits & 31 & ~segments)
    how = it.opcode[2]
    wanted = {
        "up": lane - by,
        "down": lane + by,
        "bfly": lane ^ by,
        "idx": (lane & segments) | (by & ~segments),
    }[how]
    fine = wanted >= last if how == "up" else wanted <= last
    there = np.arange(lanes.count) - lane + np.where(fine, wanted, lane)
    lanes.put(targets[0], value[there])
    if len(targets) > 1:
        lanes.put(targets[1], fine)


_REDUCED = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or, "and": np.bitwise_and}


def reduce(program: "Program", it: Statement) -> None:
    """redux.sync, of whole warps."""
    lanes, kind = program.lanes, it.opcode[-1]
    value = lanes.read(it.operands[1], kind).reshape(-1, _WARP)
    found = _REDUCED[it.opcode[2]].reduce(value, axis=1, dtype=value.dtype)
    lanes.write(it.operands[0], np.repeat(found, _WARP), kind)


def ballot(program: "Program", it: Statement) -> None:
    """vote.sync.ballot.b32, of whole warps: a bit for each lane."""
    lanes = program.lanes
    voted = lanes.truth(it.operands[1]).reshape(-1, _WARP).astype(np.uint64)
    found = (voted << np.arange(_WARP, dtype=np.uint64)).sum(axis=1).astype(np.uint32)
    lanes.write(it.operands[0], np.repeat(found, _WARP), "b32")
