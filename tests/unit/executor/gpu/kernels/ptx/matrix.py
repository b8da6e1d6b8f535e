"""Matrix instructions: mma.sync of m16n8k16, wgmma, ldmatrix and stmatrix, whose sections draw the fragments."""

import re
from typing import TYPE_CHECKING

import numpy as np

from tests.unit.executor.gpu.kernels.ptx.lanes import Array, to_numbers
from tests.unit.executor.gpu.kernels.ptx.text import Statement, inside

if TYPE_CHECKING:
    from tests.unit.executor.gpu.kernels.ptx.machine import Program

_LANE = np.arange(32)
_GROUP, _MEMBER = _LANE // 4, _LANE % 4


def multiply(program: "Program", it: Statement) -> None:
    """d = a b + c: a [16, 16], b [16, 8], c and d float32 [16, 8], of each warp."""
    assert it.opcode[3] == "m16n8k16", it.text
    lanes, kind = program.lanes, it.opcode[-3]
    assert it.opcode[-4:] == ("f32", kind, kind, "f32"), it.text
    targets, of_a, of_b, of_c = (inside(one) for one in it.operands)
    warps = lanes.count // 32
    a, b, c = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
    for at, name in enumerate(of_a):
        for half, numbers in enumerate(_halves(lanes.bits(name, 32), kind)):
            a[:, _GROUP + 8 * (at % 2), 2 * _MEMBER + half + 8 * (at // 2)] = numbers.reshape(warps, 32)
    for at, name in enumerate(of_b):
        for half, numbers in enumerate(_halves(lanes.bits(name, 32), kind)):
            b[:, 2 * _MEMBER + half + 8 * at, _GROUP] = numbers.reshape(warps, 32)
    for at, name in enumerate(of_c):
        c[:, _GROUP + 8 * (at // 2), 2 * _MEMBER + at % 2] = lanes.read(name, "f32").reshape(warps, 32)
    with np.errstate(all="ignore"):
        d = (a @ b + c).astype(np.float32)
    for at, name in enumerate(targets):
        lanes.write(name, d[:, _GROUP + 8 * (at // 2), 2 * _MEMBER + at % 2].reshape(-1), "f32")


def _halves(bits: Array, kind: str) -> tuple[Array, Array]:
    return to_numbers(bits.astype(np.uint16), kind), to_numbers((bits >> 16).astype(np.uint16), kind)


def load(program: "Program", it: Statement) -> None:
    """ldmatrix: eight threads after eight give the places of a matrix's rows, of 16 bytes each."""
    lanes, targets = program.lanes, inside(it.operands[0])
    rows = program.shared.load(program.address(it.operands[1]), 16).view(np.uint16).reshape(-1, 32, 8)
    for at, name in enumerate(targets):
        matrix = rows[:, 8 * at : 8 * at + 8]
        if "trans" in it.opcode:
            matrix = matrix.transpose(0, 2, 1)
        low, high = matrix[:, _GROUP, 2 * _MEMBER], matrix[:, _GROUP, 2 * _MEMBER + 1]
        lanes.put(name, (low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)).reshape(-1))


def store(program: "Program", it: Statement) -> None:
    """stmatrix, likewise."""
    lanes, sources = program.lanes, inside(it.operands[1])
    rows = np.zeros((lanes.count // 32, 32, 8), np.uint16)
    for at, name in enumerate(sources):
        bits = lanes.bits(name, 32).reshape(-1, 32)
        matrix = np.zeros((len(rows), 8, 8), np.uint16)
        matrix[:, _GROUP, 2 * _MEMBER] = bits.astype(np.uint16)
        matrix[:, _GROUP, 2 * _MEMBER + 1] = (bits >> 16).astype(np.uint16)
        rows[:, 8 * at : 8 * at + 8] = matrix.transpose(0, 2, 1) if "trans" in it.opcode else matrix
    giving = 8 * len(sources) > _LANE
    addresses = program.address(it.operands[0]).reshape(-1, 32)[:, giving].reshape(-1)
    data = np.ascontiguousarray(rows[:, giving]).view(np.uint8).reshape(-1, 16)
    program.shared.store(addresses, data)


def multiply_by_group(program: "Program", it: Statement) -> None:
    """wgmma of groups of four warps, and what orders it: a [64, 16] in registers or shared memory, b [16, N] there."""
    if it.opcode[1] != "mma_async":
        return
    found = re.fullmatch(r"m64n(\d+)k16", it.opcode[4])
    assert found is not None, it.text
    lanes, kind, width = program.lanes, it.opcode[-1], int(found[1])
    targets, operand_a, operand_b, adds = (inside(it.operands[0]), *it.operands[1:4])
    in_registers = operand_a.startswith("{")
    signs, turned = it.operands[4:6], it.operands[6:]
    assert signs == ("1", "1"), it.text
    assert in_registers or turned[0] == "0", it.text
    groups = lanes.count // 128
    if in_registers:
        a = np.zeros((groups, 4, 16, 16))
        for at, name in enumerate(inside(operand_a)):
            for half, numbers in enumerate(_halves(lanes.bits(name, 32), kind)):
                a[:, :, _GROUP + 8 * (at % 2), 2 * _MEMBER + half + 8 * (at // 2)] = numbers.reshape(
                    groups, 4, 32
                )
    else:
        a = np.stack(
            [_described(program, one, 64, kind, False).T for one in _descriptors(program, operand_a)]
        )
        a = a.reshape(groups, 4, 16, 16)
    b = np.stack(
        [_described(program, one, width, kind, turned[-1] == "1") for one in _descriptors(program, operand_b)]
    )
    sums = np.zeros((groups, 4, 16, width))
    places = [
        (_GROUP + 8 * (at // 2 % 2), 8 * (at // 4) + 2 * _MEMBER + at % 2) for at in range(len(targets))
    ]
    if lanes.truth(adds).all():
        for name, (row, column) in zip(targets, places, strict=True):
            sums[:, :, row, column] = lanes.read(name, "f32").reshape(groups, 4, 32)
    sums = (sums + a @ b[:, None]).astype(np.float32)
    for name, (row, column) in zip(targets, places, strict=True):
        lanes.write(name, sums[:, :, row, column].reshape(-1), "f32")


def _descriptors(program: "Program", name: str) -> list[int]:
    """One for each group of warps."""
    return [int(one) for one in program.lanes.bits(name, 64)[::128]]


def _described(program: "Program", descriptor: int, width: int, kind: str, turned: bool) -> Array:
    """[16, width] at a matrix descriptor: lines of as many bytes as the mode of swizzling says, along the 16 (K), or
    along the others where it is `turned`; eight lines lie together, and the 16-byte pieces of each are exchanged by its
    number (sections "Matrix Descriptor Format", "Swizzling Modes", "Strides")."""
    mode = descriptor >> 62
    assert mode, "memory without swizzling is not known"
    line = 256 >> mode
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    n, k = np.meshgrid(np.arange(width), np.arange(16), indexing="ij")
    if turned:
        places = start + 2 * n // line * leading + 2 * n % line + k % 8 * line + k // 8 * stride
    else:
        places = start + n // 8 * stride + n % 8 * line + 2 * k
    places ^= (places >> 7 & (line // 16 - 1)) << 4
    bits = program.shared.load(places.reshape(-1).astype(np.uint64), 2).view(np.uint16).reshape(width, 16)
    return to_numbers(bits, kind).T
