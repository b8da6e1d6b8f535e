"""Inline assembly, which the interpreter cannot run: the very text of `codes.py`, over all codes in all places."""

import ast
import inspect
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from services.executor.gpu.kernels import codes
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from tests.unit.executor.gpu.kernels.ptx.machine import run_inline


class Assembly(NamedTuple):
    """A call of `tl.inline_asm_elementwise`."""

    text: str
    constraints: str
    pack: int


def assemblies() -> list[Assembly]:
    """In the order of the module."""
    found = []
    for node in ast.walk(ast.parse(inspect.getsource(codes))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.inline_asm_elementwise":
            named: dict[str, Any] = {one.arg: one.value for one in node.keywords if one.arg}
            text, constraints = (ast.literal_eval(one) for one in node.args)
            found.append(Assembly(text, constraints, ast.literal_eval(named["pack"])))
    return found


ALL = np.arange(256, dtype=np.uint32)


@pytest.mark.parametrize(("at", "codec"), [(0, FP8), (1, INT8)])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("element", range(2))
def test_every_code_in_every_byte_becomes_the_codec_s_number(
    at: int, codec: Codec, place: int, element: int
) -> None:
    assembly = assemblies()[at]
    assert (assembly.constraints, assembly.pack) == ("=r,=r,=r,=r,r,r", 2)
    other = np.array([0x7E5A3C81], np.uint32)
    words = [np.repeat(other, 256), np.repeat(other, 256)]
    words[element] = words[element] & ~np.uint32(0xFF << 8 * place) | ALL << np.uint32(8 * place)

    found = run_inline(assembly.text, words, outputs=4)

    # Triton packs elements into registers of 32 bits from the lowest bits on (ElementwiseOpToLLVM.cpp, packOperands):
    # an output register is the numbers of the first and the second word.
    numbers = np.stack(found, axis=1).view(np.float16).reshape(256, 4, 2)
    expected = np.stack([_decoded(one, codec) for one in words], axis=2)
    assert np.array_equal(numbers.view(np.uint16), expected.view(np.uint16))


def _decoded(words: np.ndarray[Any, Any], codec: Codec) -> np.ndarray[Any, Any]:
    """float16 [256, 4] of words of four codes, by the codec's own type."""
    bytes_of = torch.from_numpy(words.view(np.uint8).reshape(-1, 4).copy())
    numbers: np.ndarray[Any, Any] = bytes_of.view(codec.dtype).to(torch.float16).numpy()
    numbers.view(np.uint16)[np.isnan(numbers)] = 0x7FFF  # what cvt makes of both NaNs (PTX ISA, "cvt")
    return numbers


def test_there_is_no_other_inline_assembly() -> None:
    assert len(assemblies()) == 2
