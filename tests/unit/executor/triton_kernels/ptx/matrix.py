"""Matrix instructions: mma.sync of m16n8k16, ldmatrix and stmatrix, whose sections draw the fragments."""

from typing import TYPE_CHECKING

import numpy as np

from tests.unit.executor.triton_kernels.ptx.lanes import Array, to_numbers
from tests.unit.executor.triton_kernels.ptx.text import Statement, inside

if TYPE_CHECKING:
    from tests.unit.executor.triton_kernels.ptx.machine import Program

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
