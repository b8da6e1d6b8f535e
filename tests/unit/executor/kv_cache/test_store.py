import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.core.layer_state import Pages
from services.executor.kv_cache.codecs import FP8, INT8, Codec
from services.executor.kv_cache.store import _COMPRESS_BYTES, KvStore
from services.executor.kv_cache.store_shape import StoreShape

CPU = torch.device("cpu")
CODECS = (INT8, None, FP8)
SHAPE = StoreShape.uniform(3, 4, 2, 8, torch.bfloat16, CODECS)
WRITABLE, QUANTIZED = 6, 5
VALUES = (2, SHAPE.kv_heads, SHAPE.block_size, SHAPE.head_dim)  # a block of one layer


def filled(shape: StoreShape = SHAPE, seed: int = 0) -> KvStore:
    """A store whose writable blocks hold random values."""
    store = KvStore(shape, WRITABLE, CPU, QUANTIZED)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(shape.num_layers):
        store.writable(layer).copy_(torch.randn(store.writable(layer).shape, generator=generator))
    return store


def decoded(codec: Codec | None, block: torch.Tensor) -> torch.Tensor:
    """What is left of `block` [2, kv_heads, block_size, head_dim] once it is quantized, in its own dtype."""
    if codec is None:
        return block
    codes, scales = codec.encode(block.flatten(2))
    return codec.decode(codes, scales).view(block.shape).to(block.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_gathered(dtype: torch.dtype) -> None:
    store = KvStore(StoreShape.uniform(2, 4, 3, 8, dtype), 6, CPU)
    key, value = torch.randn(2, 7, 3, 8).to(dtype)
    slots = torch.tensor([20, 21, 22, 23, 4, 5, 6])
    store.write(1, slots, key, value)
    keys, values = store.gather(1, torch.tensor([5, 1]), 1)
    assert keys.shape == values.shape == (1, 3, 8, 8)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert torch.equal(keys[0, :, :7].transpose(0, 1), key)
    assert torch.equal(values[0, :, :7].transpose(0, 1), value)
    assert not keys[0, :, 7].any()
    assert not any(part.any() for part in store.gather(0, torch.tensor([5, 1]), 2))


def test_tensors_for_kernels() -> None:
    store = filled()
    addresses = [(store.writable(n).data_ptr(), store.codes(n).data_ptr()) for n in range(3)]
    store.compress([[0, 6]])
    for layer, codec in enumerate(CODECS):
        writable, codes, scales = store.writable(layer), store.codes(layer), store.scales(layer)
        assert (writable.data_ptr(), codes.data_ptr()) == addresses[layer]
        assert (writable.shape, writable.dtype) == ((WRITABLE, *VALUES), torch.bfloat16)
        assert (codes.shape, codes.dtype) == ((QUANTIZED, *VALUES), codec.dtype if codec else torch.bfloat16)
        assert writable.is_contiguous()
        assert codes.is_contiguous()
        assert store.codec(layer) is codec
        assert (scales is None) == (codec is None)
        if scales is not None and codec is not None:
            assert (scales.shape, scales.dtype) == ((QUANTIZED, *VALUES[:2]), torch.float32)
            assert scales.is_contiguous()
            values = codes[0].float() * scales[0, :, :, None, None]
            assert torch.equal(values.bfloat16(), decoded(codec, writable[0]))
    assert store.nbytes == WRITABLE * SHAPE.bytes_per_block + QUANTIZED * SHAPE.bytes_per_quantized_block


@given(
    pairs=st.permutations(range(QUANTIZED)).flatmap(
        lambda quantized: st.lists(st.integers(0, WRITABLE - 1), max_size=QUANTIZED).map(
            lambda writable: list(zip(writable, quantized))  # noqa: B905
        )
    ),
    tables=st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, WRITABLE + QUANTIZED - 1), min_size=width, max_size=width), min_size=1
        )
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_mix_of_writable_and_quantized_blocks_is_gathered(
    pairs: list[tuple[int, int]], tables: list[list[int]], dtype: torch.dtype
) -> None:
    store = filled(StoreShape.uniform(3, 4, 2, 8, dtype, CODECS))
    store.compress(
        np.array([(writable, WRITABLE + quantized) for writable, quantized in pairs], dtype=np.int32).reshape(-1, 2)
    )
    ids = torch.tensor(tables)
    for layer, codec in enumerate(CODECS):
        blocks = [*store.writable(layer), *torch.zeros(QUANTIZED, *VALUES, dtype=dtype)]
        for writable, quantized in pairs:
            blocks[WRITABLE + quantized] = decoded(codec, store.writable(layer)[writable])
        expected = torch.stack([torch.cat([blocks[block] for block in table], dim=2) for table in tables])
        keys, values = store.gather(layer, ids.flatten(), len(tables))
        assert (keys.dtype, keys.is_contiguous(), values.is_contiguous()) == (dtype, True, True)
        assert torch.equal(keys, expected[:, 0])
        assert torch.equal(values, expected[:, 1])


def test_many_blocks_are_compressed_in_parts() -> None:
    shape = StoreShape.uniform(64, 16, 16, 64, torch.bfloat16, (INT8,) * 64)
    per_block = shape.values_per_block * 4
    store = KvStore(shape, 3, CPU, 3)
    assert per_block * 3 > _COMPRESS_BYTES, "the blocks go into one part"
    store.writable(63).copy_(torch.randn(store.writable(63).shape))
    store.compress([(0, 5), (1, 4), (2, 3)])
    keys, _ = store.gather(63, torch.tensor([3, 4, 5]), 3)
    for row, writable in enumerate((2, 1, 0)):
        assert torch.equal(keys[row], decoded(INT8, store.writable(63)[writable])[0])


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([[6, 7]], r"blocks \[6\] not all are writable: there are 6"),
        ([[-1, 7]], "not all are writable"),
        ([[0, 5]], r"blocks \[5\] not all are quantized: those are 6 to 10"),
        ([[0, 11]], "not all are quantized"),
        ([[0, 7], [1, 7]], "written twice"),
    ],
)
def test_compressions_that_cannot_be(pairs: list[list[int]], reason: str) -> None:
    store = filled()
    with pytest.raises(ValueError, match=reason):
        store.compress(pairs)
    assert not any(store.codes(layer).float().any() for layer in range(3))


def test_ids_that_are_none() -> None:
    store = filled()
    for block in (-1, WRITABLE + QUANTIZED):
        with pytest.raises(ValueError, match=f"no KV block {block}: there are 11"):
            store.save(block)
        with pytest.raises(ValueError, match=f"no KV block {block}"):
            store.load(block, b"")
    for blocks in ([0, WRITABLE + QUANTIZED], [WRITABLE, WRITABLE + QUANTIZED]):
        with pytest.raises(IndexError):
            store.gather(0, torch.tensor(blocks), 1)
    part = torch.zeros(1, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(IndexError):
        store.write(0, torch.tensor([WRITABLE * SHAPE.block_size]), part, part)


@pytest.mark.parametrize("block", [2, WRITABLE + 3])
def test_a_block_comes_back_bit_by_bit(block: int) -> None:
    store = filled()
    store.compress([(4, WRITABLE + 3), (5, WRITABLE)])
    content = store.save(block)
    assert len(content) == store.block_bytes(block)
    assert len(content) == (SHAPE.bytes_per_block if block < WRITABLE else SHAPE.bytes_per_quantized_block)
    other = filled(seed=1)
    target = 0 if block < WRITABLE else WRITABLE + 1
    before = other.save(target + 1)
    other.load(target, content)
    assert other.save(target) == content != before
    assert other.save(target + 1) == before
    for layer in range(3):
        for mine, theirs in zip(
            store.gather(layer, torch.tensor([block]), 1), other.gather(layer, torch.tensor([target]), 1), strict=True
        ):
            assert torch.equal(mine, theirs)


def test_saved_bytes_of_odd_sizes_come_back() -> None:
    store = KvStore(StoreShape.uniform(1, 1, 1, 3, torch.bfloat16, (INT8,)), 1, CPU, 2)
    store.write(0, torch.tensor([0]), torch.full((1, 1, 3), 2.0).bfloat16(), torch.ones(1, 1, 3).bfloat16())
    store.compress([[0, 1]])
    store.load(2, store.save(1))
    assert torch.equal(store.gather(0, torch.tensor([2]), 1)[0], torch.full((1, 1, 1, 3), 2.0).bfloat16())


def test_bytes_of_another_size_are_refused() -> None:
    store = filled()
    content = store.save(0)
    with pytest.raises(ValueError, match=f"block 1 has {len(content)} bytes and was given {len(content) - 1}"):
        store.load(1, content[:-1])
    with pytest.raises(ValueError, match="block 6 has"):
        store.load(WRITABLE, content)


def test_models_share_blocks_by_parts() -> None:
    """A model of two layers and its draft model of three of other sizes: what a part writes and compresses is in the
    whole, whose blocks are saved with both."""
    pages = (Pages(2, 2, 8), Pages(2, 1, 16), Pages(2, 1, 16))
    shape = StoreShape.uniform(2, 4, 2, 8, torch.bfloat16, (INT8, None)).followed_by(pages, INT8)
    assert shape.codecs == (INT8, None, INT8, INT8, INT8)
    whole = filled(shape)
    own, draft = whole.part(0, 2), whole.part(2, 3)
    assert (own.shape.format, draft.shape.pages) == (shape.part(0, 2).format, pages)
    assert shape.part(0, 2).format == StoreShape.uniform(2, 4, 2, 8, torch.bfloat16, (INT8, None)).format
    assert (own.num_writable, own.num_quantized, draft.num_quantized) == (WRITABLE, QUANTIZED, QUANTIZED)
    for part, first in ((own, 0), (draft, 2)):
        for layer in range(part.shape.num_layers):
            assert part.writable(layer).data_ptr() == whole.writable(first + layer).data_ptr()
            assert part.codes(layer).data_ptr() == whole.codes(first + layer).data_ptr()
            assert part.codec(layer) is whole.codec(first + layer)
    assert own.writable_layers().shape == (2, WRITABLE, 2, 2, 4, 8)
    key, value = torch.randn(2, 4, 1, 16).bfloat16()
    draft.write(2, torch.arange(4, 8), key, value)
    own.compress([[1, WRITABLE]])
    draft.compress_layer(2, torch.tensor([1]), torch.tensor([WRITABLE]))
    keys, values = whole.gather(4, torch.tensor([WRITABLE]), 1)
    assert (keys[0, 0] - key[:, 0]).abs().max() < 0.05
    assert (values[0, 0] - value[:, 0]).abs().max() < 0.05
    assert not whole.gather(3, torch.tensor([WRITABLE]), 1)[0].any()
    kept = whole.save(WRITABLE)
    whole.load(WRITABLE + 1, kept)
    assert whole.save(WRITABLE + 1) == kept
    assert len(kept) == shape.bytes_per_spilled_block
    again = draft.gather(2, torch.tensor([WRITABLE + 1]), 1).clone()
    assert torch.equal(again, draft.gather(2, torch.tensor([WRITABLE]), 1))
