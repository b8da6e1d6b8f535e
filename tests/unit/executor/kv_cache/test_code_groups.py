"""Codes in the order in which native kernels multiply them."""

import pytest
import torch

from services.executor.core.layer_state import Pages
from services.executor.kv_cache.code_groups import fits_groups, group_order, to_groups
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape

CPU = torch.device("cpu")
SIZE, WIDTH, HEADS, WRITABLE, QUANTIZED = 32, 128, 2, 3, 4


def store(*, in_groups: bool, codec: Codec = INT8) -> KvStore:
    pages = (Pages(2, HEADS, WIDTH), Pages(2, HEADS, 32))
    shape = StoreShape(SIZE, torch.bfloat16, pages, (codec, codec), in_groups=in_groups)
    return KvStore(shape, WRITABLE, CPU, QUANTIZED)


def test_where_keys_and_values_lie() -> None:
    keys, values = group_order(SIZE, WIDTH)
    for group, quad, token, code in ((0, 0, 0, 0), (0, 31, 15, 3), (1, 0, 0, 0), (1, 7, 9, 2)):
        at = ((group * WIDTH // 4 + quad) * 16 + token) * 4 + code
        assert keys[at] == (group * 16 + token) * WIDTH + quad * 4 + code
    half, four, vector, lane, token = 1, 2, 3, 6, 1  # of the second group
    at = 16 * WIDTH + half * 1024 + four * 256 + vector * 64 + lane * 4 + token
    assert values[at] == (16 + four * 4 + token) * WIDTH + half * 64 + lane // 4 * 16 + vector * 4 + lane % 4
    for order in (keys, values):
        assert torch.equal(order.sort().values, torch.arange(SIZE * WIDTH))


def test_a_store_in_groups_gives_what_one_in_order_does() -> None:
    both = [store(in_groups=in_groups) for in_groups in (False, True)]
    plain, grouped = both
    content = [torch.randn_like(plain.writable(layer)) for layer in range(2)]
    for one in both:
        for layer in range(2):
            one.writable(layer).copy_(content[layer])
        one.compress([[0, WRITABLE + 2], [2, WRITABLE]])
    assert [grouped.shape.is_in_groups(layer) for layer in range(2)] == [True, False]
    table = torch.tensor([WRITABLE + 2, 1, WRITABLE, 2])
    for layer in range(2):
        assert torch.equal(plain.gather(layer, table, 2).clone(), grouped.gather(layer, table, 2))
    ordered, there = plain.codes(0)[[0, 2]].flatten(-2), grouped.codes(0)[[0, 2]].flatten(-2)
    assert torch.equal(to_groups(ordered, SIZE), there)
    assert not torch.equal(ordered, there)


def test_their_bytes_are_of_another_format_and_mean_the_same_numbers() -> None:
    plain, grouped, other = store(in_groups=False), store(in_groups=True), store(in_groups=True, codec=FP8)
    assert plain.shape.format != grouped.shape.format
    assert plain.shape.numerics == grouped.shape.numerics == plain.shape.format
    assert plain.shape.part(1, 1).format == grouped.shape.part(1, 1).format
    assert other.shape.format == store(in_groups=False, codec=FP8).shape.format


@pytest.mark.parametrize(
    ("pages", "codec", "block_size"),
    [
        (Pages(2, 1, 96), INT8, 16),
        (Pages(2, 1, 64), INT8, 24),
        (Pages(2, 1, 64), FP8, 16),
        (Pages(2, 1, 64), None, 16),
        (Pages(1, 1, 576), INT8, 16),
        (Pages(2, 1, 64, 16), INT8, 16),
        (Pages(2, 1, 64, 16, summary=True), INT8, 16),
    ],
)
def test_what_lies_in_order(pages: Pages, codec: Codec | None, block_size: int) -> None:
    assert fits_groups(Pages(2, 1, 64), INT8, 16)
    assert not fits_groups(pages, codec, block_size)
