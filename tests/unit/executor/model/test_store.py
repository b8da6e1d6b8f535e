import pytest
import torch

from services.executor.kv_cache.sizes import StoreShape, default_budget, free_host_memory, plan_num_blocks
from services.executor.kv_cache.store import KvStore
from shared.errors import ConfigurationError

SHAPE = StoreShape(num_layers=2, block_size=4, kv_heads=3, head_dim=8, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def test_bytes_per_block_is_what_the_store_takes() -> None:
    assert SHAPE.bytes_per_block == 2 * 4 * 2 * 3 * 8 * 2
    store = KvStore(SHAPE, 5, CPU)
    assert store.nbytes == sum(store.hot(layer).nbytes for layer in range(2)) == 5 * SHAPE.bytes_per_block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_gathered(dtype: torch.dtype) -> None:
    store = KvStore(StoreShape(2, 4, 3, 8, dtype), 6, CPU)
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


def test_budget_in_blocks() -> None:
    assert plan_num_blocks(100, 16, 64, budget_bytes=1999) == 19
    assert plan_num_blocks(100, 16, 65, budget_bytes=100_000, cap=3) == 15
    assert plan_num_blocks(100, 16, 65, budget_bytes=700, cap=3) == 7
    with pytest.raises(ConfigurationError, match="raise the budget to 500 bytes"):
        plan_num_blocks(100, 16, 65, budget_bytes=499)


def test_default_budget_is_a_share_of_what_is_free() -> None:
    assert 0 < default_budget(CPU) < free_host_memory()
