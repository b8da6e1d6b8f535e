import mmap
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.model.loading.arena import allocate, blocks

CPU = torch.device("cpu")
MIB = 1 << 20


@given(st.lists(st.integers(0, 200 * MIB), max_size=60))
def test_every_tensor_has_one_block_and_blocks_are_small(sizes: list[int]) -> None:
    made = list(blocks(sizes))
    assert sorted(index for members in made for index in members) == list(range(len(sizes)))
    limit = min(max(sum(sizes) // 32, 2 * MIB), 64 * MIB)
    for members in made:
        assert members == sorted(members)
        small = [sizes[index] < 64 << 10 for index in members]
        assert all(small) or not any(small)
        assert all(small) or len(members) == 1 or sum(sizes[index] for index in members) <= limit


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    specs = [
        ((3,), torch.float32),
        ((0, 4), torch.bfloat16),
        ((), torch.int64),
        ((1000, 1501), torch.bfloat16),
        ((700, 900), torch.float32),
        ((5,), torch.bool),
    ]
    tensors = allocate(specs, CPU)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == specs
    for number, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number % 2 if tensor.dtype is torch.bool else number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == (number % 2 if tensor.dtype is torch.bool else number)).all())


def test_a_block_goes_when_its_tensors_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(mmap.mmap):
        """Memory that can be asked whether it is still there."""

    maps: list[weakref.ref[Watched]] = []

    def watched(*arguments: int, **options: int) -> Watched:
        made = Watched(*arguments, **options)
        maps.append(weakref.ref(made))
        return made

    monkeypatch.setattr(mmap, "mmap", watched)
    # A block for each large tensor; what is small lies elsewhere and keeps neither.
    tensors = allocate([((4,), torch.float32), ((3 * MIB,), torch.uint8), ((3 * MIB,), torch.uint8)], CPU)
    assert len(maps) == 2
    del tensors[1]
    assert [memory() is None for memory in maps] == [True, False]
