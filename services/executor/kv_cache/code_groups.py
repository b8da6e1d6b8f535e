"""The order in which native kernels keep codes of int8, so that attention multiplies them as they lie.

    block     groups of 16 tokens, one behind the other
    keys      of a group: codes 0..3 of tokens 0..15 | codes 4..7 of tokens 0..15 | ...
    values    of a group, 64 codes and then the next 64: tokens 0..3 of codes 0..3, 16..19, 32..35, 48..51
                                                         tokens 0..3 of codes 4..7, 20..23, 36..39, 52..55 | ...
                                                         tokens 4..7 of codes 0..3, ... | ...

A key's four codes, or those of four tokens of a value, are what processors multiply at once, unsigned bytes by signed
ones (native/digits.h): weights have no sign, so values keep theirs, and codes of keys are kept 128 above what they
are. A block takes as many bytes as in the order of its tokens.
"""

from functools import cache

import torch
from torch import Tensor

from services.executor.core.layer_state import Pages
from services.executor.kv_cache.codecs import INT8, Codec

TOKENS = 16  # of a group
COLUMNS = 64  # codes that lie together, of values
_QUAD = 4
_RAISED = -128  # what its bits are turned by in a code that is 128 above what it stands for, as a byte without a sign


def fits_groups(pages: Pages, codec: Codec | None, block_size: int) -> bool:
    """Whether such blocks can be in groups: of int8, keys and values of each token, in whole groups."""
    whole = pages.width % COLUMNS == 0 and block_size % TOKENS == 0
    return codec is INT8 and pages.parts == 2 and pages.tokens == 1 and not pages.summary and whole


@cache
def group_order(block_size: int, width: int) -> Tensor:
    """int64 [2, block_size * width]: of each code of a block's head as it lies, of keys and of values, which one it is
    in the order of tokens."""
    codes = torch.arange(block_size * width).view(block_size // TOKENS, TOKENS, width)
    keys = codes.view(-1, TOKENS, width // _QUAD, _QUAD).transpose(1, 2)
    values = codes.view(-1, TOKENS // _QUAD, _QUAD, width // COLUMNS, 4, 4, _QUAD).permute(0, 3, 1, 5, 4, 6, 2)
    return torch.stack([keys.flatten(), values.flatten()])


def to_groups(codes: Tensor, block_size: int) -> Tensor:
    """int8 [..., 2, heads, block_size * width], which are in the order of tokens."""
    order = group_order(block_size, codes.shape[-1] // block_size).unsqueeze(1)
    grouped = codes.take_along_dim(order.expand_as(codes), -1)
    grouped[..., 0, :, :] ^= _RAISED
    return grouped


def from_groups(codes: Tensor, parts: Tensor, block_size: int) -> Tensor:
    """int8 [n, block_size * width], keys where `parts` int64 [n] is 0 and values where it is 1: in the order of
    tokens."""
    order = group_order(block_size, codes.shape[1] // block_size)
    ordered = torch.empty_like(codes).scatter_(1, order[parts], codes)
    return ordered ^ torch.where(parts == 0, _RAISED, 0).to(torch.int8).unsqueeze(1)
