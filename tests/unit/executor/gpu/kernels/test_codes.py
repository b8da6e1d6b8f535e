"""Codes in registers: inline assembly over all codes in all places, and what both stores are widened to."""

import ast
import inspect

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels are written in Triton")

from services.executor.gpu.kernels import codes
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from tests.inline_assembly import run


def assemblies() -> list[tuple[str, str, int]]:
    """(text, constraints, pack) of each, in the order of the module."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(codes))) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func) == "tl.inline_asm_elementwise"]
    named = [{one.arg: one.value for one in call.keywords} for call in calls]
    texts = [[ast.literal_eval(one) for one in call.args] for call in calls]
    return [(*text, ast.literal_eval(one["pack"])) for text, one in zip(texts, named, strict=True)]


@pytest.mark.parametrize(("at", "codec"), [(0, FP8), (1, INT8)], ids=str)
def test_every_code_in_every_byte_becomes_the_codec_s_number(at: int, codec: Codec) -> None:
    """The very text, which is all that there is of it."""
    text, constraints, pack = assemblies()[at]
    assert (len(assemblies()), constraints, pack) == (2, "=r,=r,=r,=r,r,r", 2)
    every = np.arange(256, dtype=np.uint32)
    for place, element in np.ndindex(4, 2):
        words = [np.full(256, 0x7E5A3C81, np.uint32), np.full(256, 0x7E5A3C81, np.uint32)]
        words[element] = words[element] & ~np.uint32(0xFF << 8 * place) | every << np.uint32(8 * place)
        found = np.stack(run(text, words, outputs=4), axis=1).view(np.float16).reshape(256, 4, 2)
        expected = torch.stack([decoded(one, codec) for one in words], dim=2)
        assert torch.equal(torch.from_numpy(found).view(torch.int16), expected.view(torch.int16))


def decoded(words: np.ndarray, codec: Codec) -> Tensor:  # type: ignore[type-arg]
    """float16 [256, 4] of words of four codes, by the codec's own type."""
    numbers = torch.from_numpy(words.view(np.uint8).reshape(-1, 4).copy()).view(codec.dtype).half()
    numbers.view(torch.int16)[numbers.isnan()] = 0x7FFF  # what cvt makes of both NaNs (PTX ISA, "cvt")
    return numbers
