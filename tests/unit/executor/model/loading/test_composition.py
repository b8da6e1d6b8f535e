from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from services.executor.core.sharding import ShardRange
from services.executor.model.loading import reading
from services.executor.model.loading.composition import Composition, concatenated, stacked
from services.executor.model.loading.reading import Read, ReadMeter, read_all
from services.executor.model.loading.weight_files import WeightFiles


def built(content: Composition, stored: dict[str, Tensor]) -> Tensor:
    """What `content` says, with a check that its parts cover it once."""
    made = torch.full(content.shape, -1)
    for part in content.parts:
        place = part.place(made)
        assert bool((place == -1).all())
        place.copy_(part.view(stored[part.source]))
    assert bool((made != -1).all())
    return made


@st.composite
def compositions(draw: st.DrawFn) -> tuple[Composition, Tensor, dict[str, Tensor]]:
    """A composition made by random steps, the tensor that the same steps make, and the stored tensors."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    stored = {
        name: torch.arange(torch.Size(shape).numel()).view(shape) + 1000 * index
        for index, name in enumerate(("a", "b", "c"))
    }
    made = [(Composition.whole(name, tensor.shape), tensor) for name, tensor in stored.items()]
    content, tensor = made[0]
    for step in draw(st.lists(st.sampled_from(["stack", "cat", "swap", "cut", "split"]), max_size=4)):
        dim = draw(st.integers(0, tensor.dim() - 1))
        fitting = [(other, value) for other, value in made if value.shape == tensor.shape]
        if step == "stack" and tensor.dim() < 4:
            pieces = [(content, tensor), *fitting]
            content = stacked([piece for piece, _ in pieces], dim)
            tensor = torch.stack([value for _, value in pieces], dim)
        elif step == "cat":
            pieces = [*fitting, (content, tensor)]
            content = concatenated([piece for piece, _ in pieces], dim)
            tensor = torch.cat([value for _, value in pieces], dim)
        elif step == "swap":
            other = draw(st.integers(0, tensor.dim() - 1))
            content, tensor = content.transposed(dim, other), tensor.transpose(dim, other)
        elif step == "cut":
            cuts = draw(st.lists(st.tuples(*[st.integers(0, tensor.shape[dim])] * 2), min_size=1, max_size=3))
            spans = [ShardRange(min(cut), max(cut)) for cut in cuts]
            content = content.selected(dim, spans)
            tensor = torch.cat([tensor.narrow(dim, span.start, span.size) for span in spans], dim)
        elif step == "split":
            first = draw(st.integers(0, tensor.shape[dim]))
            sizes = [first, tensor.shape[dim] - first]
            content, tensor = content.split(sizes, dim)[1], tensor.split(sizes, dim)[1]
    return content, tensor, stored


@given(compositions())
def test_boxes_make_the_tensor_that_torch_makes(made: tuple[Composition, Tensor, dict[str, Tensor]]) -> None:
    content, tensor, stored = made
    assert content.shape == tuple(tensor.shape)
    assert torch.equal(built(content, stored), tensor)
    if tensor.dim() == 3 and (flat := content.flattened()) is not None:
        assert torch.equal(built(flat, stored), tensor.flatten(0, 1))


def test_experts_one_by_one_and_stacked_are_matrices_one_below_the_other() -> None:
    stored = {name: torch.arange(24).view(2, 3, 4) + 100 * index for index, name in enumerate("ab")}
    whole = [Composition.whole(name, (2, 3, 4)) for name in stored]
    for content in (concatenated(whole, 1), concatenated(whole, 0).selected(2, [ShardRange(1, 3)])):
        flat = content.flattened()
        assert flat is not None
        assert torch.equal(built(flat, stored), built(content, stored).flatten(0, 1))
    assert whole[0].transposed(1, 2).flattened() is None


CPU = torch.device("cpu")


def test_slices_are_cast_on_the_way_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE", 100)
    stored = {"a": torch.randn(37, 11), "n": torch.arange(6), "s": torch.tensor(2.5)}
    save_file(stored, tmp_path / "model.safetensors")
    reports: list[tuple[int, int]] = []
    with WeightFiles(tmp_path) as files:
        whole = {name: Composition.whole(name, shape) for name, shape in files.shapes.items()}
        made = read_all(
            [
                Read(whole["a"].selected(1, [ShardRange(2, 5), ShardRange(7, 9)]), torch.bfloat16),
                Read(whole["n"], torch.int64),
                Read(whole["s"], torch.float64),
                Read(whole["a"].transposed(0, 1).selected(0, [ShardRange(3, 4)]), torch.float32),
            ],
            files,
            CPU,
            lambda done, total: reports.append((done, total)),
        )
    assert torch.equal(made[0], stored["a"][:, [2, 3, 4, 7, 8]].bfloat16())
    assert torch.equal(made[1], stored["n"])
    assert made[2].item() == 2.5
    assert torch.equal(made[3], stored["a"].T[3:4])
    total = 37 * 5 * 2 + 6 * 8 + 8 + 37 * 4
    assert reports[0] == (0, total)
    assert reports[-1] == (total, total)
    assert len(reports) > 5


def test_progress_is_told_in_order_and_not_too_often() -> None:
    reports: list[tuple[int, int]] = []
    meter = ReadMeter(lambda done, total: reports.append((done, total)), 100_000)
    for _ in range(100_000):
        meter.add(1)
    meter.finish()
    assert reports[0] == (0, 100_000)
    assert reports[-1] == (100_000, 100_000)
    assert reports == sorted(set(reports))
    assert len(reports) <= 201
