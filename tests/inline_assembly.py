"""PTX as far as our inline assembly uses it, on NumPy arrays: registers of 16 and 32 bits of many threads at once.

Source of all meanings: NVIDIA, "PTX ISA" 9.0, https://docs.nvidia.com/cuda/parallel-thread-execution; the sections are
the instructions' names.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half().view(torch.int16).numpy().view(np.uint16)
# float16 of all e4m3, whose NaNs become the one without a sign.
_HALVES = np.where(np.arange(256) & 0x7F == 0x7F, np.uint16(0x7FFF), _E4M3).astype(np.uint32)


def run(text: str, inputs: Sequence[Words], outputs: int) -> list[Words]:
    """`$0`, `$1` ... are the `outputs` registers, and behind them those of `inputs`."""
    registers = {f"${outputs + at}": value for at, value in enumerate(inputs)}

    def read(name: str) -> Words:
        return registers[name] if name in registers else np.full(len(inputs[0]), int(name, 0), np.uint32)

    for statement in filter(None, (piece.strip(" \n{") for piece in text.strip(" \n{}").split(";"))):
        opcode, _, rest = statement.partition(" ")
        if opcode == ".reg":
            continue
        target, *names = re.findall(r"{[^}]*}|[\w$]+", rest)
        sources = [read(name) for name in names]
        if target.startswith("{"):
            assert opcode == "mov.b32", statement
            low, high = re.findall(r"[\w$]+", target)
            registers |= {low: sources[0] & 0xFFFF, high: sources[0] >> 16}
        else:
            registers[target] = _OPERATIONS[opcode](*sources)
    return [registers[f"${at}"] for at in range(outputs)]


def run_packed(text: str, words: Words, outputs: int, pack: int) -> list[NDArray[Any]]:
    """What `tl.inline_asm_elementwise` makes of `words`, a float16 of each for each of `outputs`: `pack` neighbours are
    inputs of one thread, and their halves lie in its registers from the lowest bits on (Triton,
    ElementwiseOpToLLVM.cpp, packOperands)."""
    assert pack == 2, "a register holds two halves"
    flat = np.ascontiguousarray(words).reshape(-1, pack)
    found = run(text, [flat[:, at] for at in range(pack)], outputs)
    return [np.ascontiguousarray(one).view(np.float16).reshape(words.shape) for one in found]


def _permuted(a: Words, b: Words, chosen: Words) -> Words:
    """prmt.b32, whose selectors choose of the eight bytes of b a; none of ours asks for a sign."""
    bytes_of = np.stack([(one >> (8 * at)) & 0xFF for one in (a, b) for at in range(4)])
    made = np.zeros_like(a)
    for at in range(4):
        digit = (chosen >> (4 * at)) & 15
        assert digit.max() < 8
        made |= np.take_along_axis(bytes_of, digit[None].astype(np.intp), 0)[0] << (8 * at)
    return made


def _difference(a: Words, b: Words) -> Words:
    """sub.rn.f16x2"""
    halves = [np.ascontiguousarray(one).view(np.float16).astype(np.float32) for one in (a, b)]
    return (halves[0] - halves[1]).astype(np.float16).view(np.uint32)


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "xor.b32": np.bitwise_xor,
    "prmt.b32": _permuted,
    "sub.rn.f16x2": _difference,
    "cvt.rn.f16x2.e4m3x2": lambda codes: _HALVES[codes & 0xFF] | _HALVES[codes >> 8] << 16,
}
