"""Blocks of GGUF types of one to three bits, whose values lie together in books: codes name rows of a book.

A row of a book is 4 or 8 values. Each of them becomes a code of its own, of two to four bits, so that products know no
books: value = super * scale * table[code]. What is read so takes 2.1 to 4.5 bits a weight in memory, 1.6 to 3.4 in the
file. The books are those of the package `gguf`.

Source: https://github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h and ggml-quants.c.
"""

from functools import cache

import torch
from gguf import quants
from torch import Tensor

from services.executor.model.quantized import E2M1, QuantizedRows

_EIGHTH, _QUARTER = 0.125, 0.25
_TWO_BITS = (8, 25, 43, 0, -8, -25, -43, 0)
_THREE_BITS = (4, 12, 20, 28, 36, 44, 52, 62)
_ODD = (1, 3, 5, 7, 9, 11, 13, 15)
# Eight times -1, 0 and 1, each an eighth less, then each an eighth more
_NEAR_ONE = (-9, -1, 7, 0, -7, 1, 9, 0)


def iq2_xxs(blocks: Tensor) -> QuantizedRows:
    words = _words(blocks, 2, 66, torch.int32).reshape(*blocks.shape[:2], 8, 2)
    rows, more = words[..., :1].contiguous().view(torch.uint8), words[..., 1]
    codes = _book("IQ2_XXS")[rows.long()]
    scales = more >> 28 & 15
    return _signed(blocks, codes, _signs(more), 4, scales, 32, _TWO_BITS, 3, _EIGHTH)


def iq2_xs(blocks: Tensor) -> QuantizedRows:
    words = _words(blocks, 2, 66, torch.int16).long() & 0xFFFF
    codes = _book("IQ2_XS")[words & 511]
    negative = bits_of(_sign_book()[words >> 9])
    return _signed(blocks, codes, negative, 4, _nibbles(blocks, 66, 74), 16, _TWO_BITS, 3, _EIGHTH)


def iq2_s(blocks: Tensor) -> QuantizedRows:
    high = parts_of(blocks[..., 66:74], 2)
    rows = blocks[..., 2:34].long() | high.long() << 8
    negative = bits_of(blocks[..., 34:66])
    codes = _book("IQ2_S")[rows]
    return _signed(blocks, codes, negative, 4, _nibbles(blocks, 74, 82), 16, _TWO_BITS, 3, _EIGHTH)


def iq3_xxs(blocks: Tensor) -> QuantizedRows:
    codes = _book("IQ3_XXS")[blocks[..., 2:66].long()]
    more = _words(blocks, 66, 98, torch.int32)
    table = (*_THREE_BITS, *(-value for value in _THREE_BITS))
    return _signed(blocks, codes, _signs(more), 8, more >> 28 & 15, 32, table, 4, _QUARTER)


def iq3_s(blocks: Tensor) -> QuantizedRows:
    rows = blocks[..., 2:66].long() | bits_of(blocks[..., 66:74]).flatten(2).long() << 8
    negative = bits_of(blocks[..., 74:106])
    table = (*_ODD, *(-value for value in _ODD))
    return _signed(blocks, _book("IQ3_S")[rows], negative, 8, _nibbles(blocks, 106, 110), 32, table, 4, 1.0)


def iq1_s(blocks: Tensor) -> QuantizedRows:
    more = _words(blocks, 34, 50, torch.int16).long() & 0xFFFF
    high = (more.unsqueeze(3) >> torch.tensor([0, 3, 6, 9])) & 7
    rows = blocks[..., 2:34].reshape(high.shape).long() | high << 8
    codes = _book("IQ1_S")[rows] + 4 * (more < 0x8000)[..., None, None].to(torch.uint8)
    return _rows(codes, halves_of(blocks, 0).float(), more >> 12 & 7, 32, _NEAR_ONE, 3, _EIGHTH)


def iq1_m(blocks: Tensor) -> QuantizedRows:
    more = _words(blocks, 48, 56, torch.int16).long() & 0xFFFF
    bits = (more >> 12) << torch.tensor([0, 4, 8, 12])
    halves = bits.sum(2, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    scales = (more.unsqueeze(3) >> torch.tensor([0, 3, 6, 9])) & 7
    high = _nibbles(blocks, 32, 48).long()
    rows = blocks[..., :32].long() | (high & 7) << 8
    codes = _book("IQ1_S")[rows] + 4 * (high < 8).unsqueeze(3).to(torch.uint8)
    return _rows(codes, halves, scales.flatten(2), 16, _NEAR_ONE, 3, _EIGHTH)


def tq1_0(blocks: Tensor) -> QuantizedRows:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)
    threes = [
        blocks[..., first:end].unsqueeze(2) * powers[:count].view(-1, 1)
        for first, end, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
    ]
    codes = torch.cat([part.flatten(2) for part in threes], 2).short() * 3 >> 8
    return QuantizedRows(flat(codes.to(torch.uint8)), 2, 256, halves_of(blocks, 52), offset=1)


def tq2_0(blocks: Tensor) -> QuantizedRows:
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(-1, 1)
    codes = blocks[..., :64].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & 3
    return QuantizedRows(flat(codes), 2, 256, halves_of(blocks, 64), offset=1)


def nvfp4(blocks: Tensor) -> QuantizedRows:
    small = blocks[..., :4]
    exponent, part = (small >> 3 & 15).float(), (small & 7).float()
    above = (1 + part / 8) * torch.exp2(exponent - 7)
    scales = torch.where(exponent == 0, part * 2**-9, above) / 2
    scales[small == 0x7F] = 0  # as ggml has it
    data = blocks[..., 4:].reshape(*blocks.shape[:2], 4, 1, 8)
    codes = data >> torch.tensor([0, 4], dtype=torch.uint8).view(-1, 1) & 15
    return QuantizedRows(flat(codes), 4, 16, scales.flatten(1).bfloat16(), table=E2M1)


def _signed(
    blocks: Tensor,
    codes: Tensor,
    negative: Tensor,
    least: int,
    scales: Tensor,
    group: int,
    table: tuple[int, ...],
    bits: int,
    factor: float,
) -> QuantizedRows:
    """`codes` of magnitudes; those that are `negative` (0 or 1) are `least` further in the table."""
    signed = codes.flatten(2) + least * negative.flatten(2).to(torch.uint8)
    return _rows(signed, halves_of(blocks, 0).float(), scales, group, table, bits, factor)


def _rows(
    codes: Tensor, halves: Tensor, scales: Tensor, group: int, table: tuple[int, ...], bits: int, factor: float
) -> QuantizedRows:
    """`scales` stand for twice themselves and 1; `halves` [rows, blocks] float32 times `factor` for a block."""
    odd = (2 * scales + 1).to(torch.uint8).flatten(1)
    return QuantizedRows(flat(codes), bits, group, odd, table=table, supers=halves * factor, per=256 // group)


@cache
def _book(name: str) -> Tensor:
    """uint8 [rows, values]: codes, by the place of a value among those that the book has."""
    kind = getattr(quants, name)
    kind.init_grid()
    values = torch.from_numpy(kind.grid).squeeze(0).squeeze(0)
    held = torch.tensor(kind.grid_map, dtype=torch.float32)
    return (values.unsqueeze(2) == held).int().argmax(2).to(torch.uint8)


@cache
def _sign_book() -> Tensor:
    """uint8 [128]: eight signs by seven of them; their number is even."""
    return torch.frombuffer(bytearray(quants.IQ2_XXS.ksigns), dtype=torch.uint8)


def _signs(words: Tensor) -> Tensor:
    """[rows, blocks, words, 4, 8]: four rows of the book in each word of 32 bits."""
    rows = (words.unsqueeze(3).long() >> torch.tensor([0, 7, 14, 21])) & 127
    return bits_of(_sign_book()[rows])


def bits_of(bytes_: Tensor) -> Tensor:
    """The eight bits of each byte, the lowest first, as a dimension behind the others."""
    return (bytes_.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1


def parts_of(bytes_: Tensor, bits: int) -> Tensor:
    """The numbers of `bits` bits of each byte, the lowest first: [rows, blocks, all]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((bytes_.unsqueeze(3) >> shifts) & ((1 << bits) - 1)).flatten(2)


def _nibbles(blocks: Tensor, first: int, end: int) -> Tensor:
    return parts_of(blocks[..., first:end], 4)


def _words(blocks: Tensor, first: int, end: int, dtype: torch.dtype) -> Tensor:
    return blocks[..., first:end].clone(memory_format=torch.contiguous_format).view(dtype)


def halves_of(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: [rows, blocks]"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def flat(codes: Tensor) -> Tensor:
    return codes.reshape(codes.shape[0], -1)
