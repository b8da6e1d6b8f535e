"""Programs of a grid, one after the other."""

import re
from collections.abc import Sequence
from itertools import product

import numpy as np

from tests.unit.executor.gpu.kernels.ptx import instructions, matrix
from tests.unit.executor.gpu.kernels.ptx.lanes import UNSIGNED, Array, Lanes, bits_of
from tests.unit.executor.gpu.kernels.ptx.memory import Memory
from tests.unit.executor.gpu.kernels.ptx.text import Kernel, Statement, inside, parse, parse_body

_SHARED_AT = 0x10000
"""Where shared memory begins; 0 would hide what was forgotten."""
_PLACE = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]")


class Program:
    """One of a grid."""

    def __init__(
        self,
        kernel: Kernel,
        place: Sequence[int],
        grid: Sequence[int],
        threads: int,
        shared: int,
        memory: Memory,
    ) -> None:
        names = {f"%ctaid.{axis}": at for axis, at in zip("xyz", place, strict=True)}
        names |= {f"%nctaid.{axis}": size for axis, size in zip("xyz", grid, strict=True)}
        names |= {"%ntid.x": threads, "global_smem": _SHARED_AT}
        self.lanes = Lanes(threads, names)
        self.memory = memory
        self.shared = Memory()
        self.shared.give(np.zeros(shared + 16, np.uint8), _SHARED_AT)
        self.parameters: dict[str, int] = {}
        self._kernel = kernel
        self._at = 0
        self._copies: list[list[tuple[Array, Array]]] = [[]]
        """Groups of copies to shared memory that are under way: places, bytes. The last is being filled."""

    def run(self) -> None:
        statements = self._kernel.statements
        while self._at < len(statements):
            it = statements[self._at]
            self._at += 1
            self._do(it)

    def _do(self, it: Statement) -> None:
        guard = self.lanes.truth(it.guard) ^ it.negated if it.guard else None
        if it.opcode[0] in ("bra", "ret"):
            self._jump(it, guard)
            return
        self.lanes.guard = guard
        if guard is None or guard.any():
            DOES[it.opcode[0]](self, it)
        self.lanes.guard = None

    def _jump(self, it: Statement, guard: Array | None) -> None:
        if guard is not None:
            assert guard.all() or not guard.any(), f"threads part at {it.text}"
            if not guard.any():
                return
        self._at = (
            self._kernel.labels[it.operands[0]] if it.opcode[0] == "bra" else len(self._kernel.statements)
        )

    def address(self, place: str) -> Array:
        """uint64 of every thread, of `[register + number]`."""
        found = _PLACE.fullmatch(place.strip())
        assert found is not None, place
        base = self.lanes.bits(found[1], 64)
        return base + np.uint64(int(found[2] or "0", 0) & (2**64 - 1))

    def memory_of(self, it: Statement) -> Memory:
        return self.shared if "shared" in it.opcode else self.memory

    # --- what reads and writes ---------------------------------------------------------------------

    def load(self, it: Statement) -> None:
        width, lanes = bits_of(it.opcode[-1]), self.lanes
        if "param" in it.opcode:
            found = _PLACE.fullmatch(it.operands[1])
            assert found is not None
            value = np.full(lanes.count, self.parameters[found[1]], np.uint64)
            lanes.put(it.operands[0], value.astype(UNSIGNED[width]))
            return
        assert it.opcode[-1] not in ("s8", "s16"), it.text
        targets = inside(it.operands[0])
        who = self._who()
        data = self.memory_of(it).load(self.address(it.operands[1])[who], len(targets) * width // 8)
        numbers = data.view(UNSIGNED[width])
        for at, name in enumerate(targets):
            whole = np.zeros(lanes.count, UNSIGNED[width])
            whole[who] = numbers[:, at]
            lanes.put(name, whole)

    def store(self, it: Statement) -> None:
        width, who = bits_of(it.opcode[-1]), self._who()
        numbers = np.stack([self.lanes.bits(one, width)[who] for one in inside(it.operands[1])], axis=1)
        self.memory_of(it).store(
            self.address(it.operands[0])[who], np.ascontiguousarray(numbers).view(np.uint8)
        )

    def atomic(self, it: Statement) -> None:
        """atom.add of 32 bits: thread after thread."""
        assert it.opcode[-2:] == ("add", "u32"), it.text
        old = np.zeros(self.lanes.count, np.uint32)
        addresses, values = self.address(it.operands[1]), self.lanes.bits(it.operands[2], 32)
        memory = self.memory_of(it)
        for at in np.flatnonzero(self._who()):
            place = addresses[at : at + 1]
            old[at] = memory.load(place, 4).view(np.uint32)[0, 0]
            memory.store(place, (old[at : at + 1] + values[at : at + 1]).view(np.uint8).reshape(1, 4))
        self.lanes.put(it.operands[0], old)

    def copy(self, it: Statement) -> None:
        """cp.async: what is copied is there once its group has been waited for, not before."""
        if "commit_group" in it.opcode:
            self._copies.append([])
        elif "wait_group" in it.opcode or "wait_all" in it.opcode:
            left = int(it.operands[0], 0) if it.operands else 0
            while len(self._copies) > left + 1:
                for places, data in self._copies.pop(0):
                    self.shared.store(places, data)
        else:
            size, who = int(it.operands[2], 0), self._who()
            given = (
                self.lanes.bits(it.operands[3], 32)
                if len(it.operands) > 3
                else np.full(self.lanes.count, size)
            )
            assert np.isin(given, (0, size)).all(), it.text
            reads = who & (given == size)
            data = np.zeros((self.lanes.count, size), np.uint8)
            data[reads] = self.memory.load(self.address(it.operands[1])[reads], size)
            self._copies[-1].append((self.address(it.operands[0])[who], data[who]))

    def nothing(self, it: Statement) -> None:
        """What orders threads that are in step anyway."""

    def _who(self) -> Array:
        return np.ones(self.lanes.count, bool) if self.lanes.guard is None else self.lanes.guard


DOES = {
    **dict.fromkeys(instructions.OPERATIONS, instructions.arithmetic),
    "mov": instructions.move, "shl": instructions.shift, "shr": instructions.shift, "prmt": instructions.permute,
    "lop3": instructions.logic, "bfe": instructions.extract, "popc": instructions.count_bits,
    "selp": instructions.select, "setp": instructions.compare, "cvt": instructions.convert,
    "shfl": instructions.exchange, "redux": instructions.reduce, "vote": instructions.ballot,
    "mma": matrix.multiply, "ldmatrix": matrix.load, "stmatrix": matrix.store, "wgmma": matrix.multiply_by_group,
    "ld": Program.load, "st": Program.store, "atom": Program.atomic, "cp": Program.copy,
    "bar": Program.nothing, "fence": Program.nothing,
}  # fmt: skip


def run(
    ptx: str, grid: Sequence[int], warps: int, shared: int, values: Sequence[int], memory: Memory
) -> None:
    """The programs of `grid`; `values`: of the kernel's parameters, as bits; those that Triton adds get 0."""
    kernel = parse(ptx)
    grid = [*grid, 1, 1][:3]
    for z, y, x in product(*(range(size) for size in reversed(grid))):
        program = Program(kernel, (x, y, z), grid, 32 * warps, shared, memory)
        padded = [*values, *[0] * len(kernel.parameters)]
        program.parameters = dict(zip(kernel.parameters, padded, strict=False))
        program.run()


def run_inline(text: str, inputs: Sequence[Array], outputs: int) -> list[Array]:
    """The text of inline assembly, whose `$0`, `$1` ... are `outputs` registers and then those of `inputs` uint32."""
    named = re.sub(r"\$(\d+)", r"operand\1", text)
    statements, labels = parse_body(named)
    program = Program(Kernel([], statements, labels), (0, 0, 0), (1, 1, 1), len(inputs[0]), 0, Memory())
    for at, value in enumerate(inputs):
        program.lanes.put(f"operand{outputs + at}", value)
    program.run()
    return [program.lanes.bits(f"operand{at}", 32) for at in range(outputs)]
