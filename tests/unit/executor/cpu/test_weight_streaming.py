"""Weights of which a part stays in the file: the same bits as with all in memory, in no more memory than allowed."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.collectives.base import SingleRank
from services.executor.core.sharding import ShardLayout
from services.executor.cpu import packed_file, weight_streaming
from services.executor.cpu.weight_cache import CachedWeights
from services.executor.cpu.weight_streaming import (
    Extent,
    LayerExtents,
    WeightStreamer,
    joined,
    measure_rate,
    pieces_of,
    plan_residency,
)
from services.executor.kv_cache.store import KvStore
from services.executor.worker.backends.base import RunnerRequest
from services.executor.worker.backends.native_runner import native_runner
from services.executor.worker.runner import ModelRunner
from shared.errors import ConfigurationError
from shared.messages import StreamedWeights
from tests.unit.executor.cpu.test_weight_cache import built, cache_of, logits, model_of
from tests.unit.executor.model.lanes import in_lanes, natively
from tests.unit.executor.model.ring import CPU, NUM_BLOCKS, NUM_SLOTS

PAGE = os.sysconf("SC_PAGE_SIZE")
AROUND = 16 * PAGE  # what Linux maps with a page that is asked for, of those that are in its cache
LAYERS = st.lists(
    st.builds(
        lambda dense, routed, chosen: LayerExtents([Extent(0, dense)], [Extent(0, routed)], chosen),
        st.integers(1, 100),
        st.integers(0, 1000),
        st.sampled_from([0.125, 1.0]),
    ),
    max_size=12,
)


def least_of(layers: list[LayerExtents], fixed: int) -> int:
    """Bytes that the refusal names: with as many of them, nothing is refused."""
    with pytest.raises(ConfigurationError) as refused:
        plan_residency(layers, fixed, -1)
    least = int(re.findall(r"needs (\d+) at least", refused.value.message)[0])
    assert plan_residency(layers, fixed, least).memory == least
    return least


@given(layers=LAYERS, fixed=st.integers(0, 100), budget=st.integers(0, 5000))
def test_what_stays_fits_and_no_layer_is_streamed_in_vain(layers: list[LayerExtents], fixed: int, budget: int) -> None:
    whole = fixed + sum(layer.size for layer in layers)
    least = least_of(layers, fixed)
    assert least <= whole
    if budget < least:
        with pytest.raises(ConfigurationError, match=f" {budget} bytes, .* needs {least} at least"):
            plan_residency(layers, fixed, budget)
        return
    found = plan_residency(layers, fixed, budget)
    assert found.memory <= budget
    streamed = [layers[at] for at in found.streamed]
    assert found.per_step == round(sum(layer.per_row for layer in streamed))
    # All that can be there at a time: what stays, a layer, and what is read ahead of the next one.
    stays = whole - sum(layer.size for layer in streamed)
    assert not streamed or len(streamed) > 2, "of two, each is the next one, and none is given back"
    for now, coming in zip(streamed, [*streamed[1:], *streamed[:1]], strict=True):
        assert stays + now.size + coming.ahead <= found.memory
    if budget >= whole:
        assert not streamed


def test_equal_layers_are_streamed_evenly() -> None:
    layers = [LayerExtents([Extent(0, 10)], [])] * 12
    assert plan_residency(layers, 5, 5 + 8 * 10 + 2 * 10).streamed == (2, 5, 8, 11)
    assert plan_residency(layers, 5, 25).streamed == tuple(range(12))
    with pytest.raises(ConfigurationError, match=r"is 24 bytes, .* needs 25 at least: 5 for .*, and 20 for"):
        plan_residency(layers, 5, 24)


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 20)).map(lambda one: Extent(*one)), max_size=9))
def test_joined_extents_and_pieces_have_every_byte(extents: list[Extent]) -> None:
    found = joined(extents)
    assert all(any(one.offset <= extent.offset and extent.end <= one.end for one in found) for extent in extents)
    assert all(one.end < other.offset for one, other in pairwise(found))
    pieces = pieces_of(found)
    assert all(piece.offset % PAGE == 0 for piece in pieces)
    for extent in found:
        inside = [piece for piece in pieces if piece.offset < extent.end and piece.end > extent.offset]
        assert inside[0].offset <= extent.offset
        assert all(one.end >= other.offset for one, other in pairwise(inside))
        assert inside[-1].end >= extent.end


class Case:
    """A model in a file, to be served of it."""

    def __init__(self, tmp_path: Path, model_type: str, weights: str = "", **changes: Any) -> None:
        model = model_of(tmp_path / "model", model_type, num_hidden_layers=6, **changes)
        self.facts, self.runner = built(model, weights)
        self.cache = cache_of(tmp_path, model)
        assert self.runner.packed is not None
        self.cache.keep(self.facts, self.runner.packed)

    @property
    def layers(self) -> list[LayerExtents]:
        file = self.cache.find()
        pages = file._pages()
        found = packed_file._layers_of(file._model_over(pages), pages.data_ptr())
        file.close()
        return found

    def stream(self, budget: int) -> CachedWeights:
        file = self.cache.find()
        assert file is not None
        found = self.cache.stream(file, 2, budget, lambda done, total: None)
        assert found is not None
        return found

    def runner_of(self, found: CachedWeights) -> ModelRunner:
        shape = self.runner._store.shape
        store = KvStore(shape, NUM_BLOCKS, CPU, num_slots=NUM_SLOTS if shape.slot else 0)
        layout = ShardLayout.of(self.facts.heads, 1, 0)
        request = RunnerRequest(None, store, layout, SingleRank(), CPU, 2)
        return native_runner(found.model, self.facts.widths, request, "cached", found.streamer)

    @property
    def least(self) -> int:
        with pytest.raises(ConfigurationError) as refused:
            self.stream(1)
        return int(re.findall(r"needs (\d+) at least", refused.value.message)[0])


MOE = {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}


@natively
@pytest.mark.parametrize(
    ("model_type", "weights", "changes"),
    [
        *(("llama", "", {}), ("qwen3_moe", "q4_k", MOE)),
        *in_lanes([("llama", "q4_k", {}), ("qwen3_moe", "", MOE), ("gemma2", "", {})], ()),
    ],
)
def test_the_same_bits_whatever_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, weights: str, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(packed_file, "_PIECE", 4096)  # many pieces, and tensors across their borders
    monkeypatch.setattr(weight_streaming, "PIECE", 2 * PAGE)
    case = Case(tmp_path, model_type, weights, **changes)
    least, expected = case.least, logits(case.runner)
    whole = sum(layer.size for layer in case.layers)
    for budget in (least, least + whole // 3):
        found = case.stream(budget)
        assert 0 < len(found.streamer.layers) <= 6
        assert found.streamer.weights.memory <= budget
        runner = case.runner_of(found)
        for _ in range(2):  # again, with what the first ones have left
            for ours, theirs in zip(logits(runner), expected, strict=True):
                assert torch.equal(ours, theirs)
        runner.native.close()
        runner.native.close()


@natively
def test_weights_that_fit_are_all_in_memory(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama")
    found = case.stream(1 << 30)
    assert found.streamer is None
    for ours, theirs in zip(logits(case.runner_of(found)), logits(case.runner), strict=True):
        assert torch.equal(ours, theirs)


def resident(address: int) -> int:
    """Bytes of the mapping that begins at `address` that are in this process's memory."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    raise AssertionError("there is no such mapping")


@natively
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_memory_stays_within_its_bound(tmp_path: Path, model_type: str) -> None:
    sizes = {"hidden_size": 288, "intermediate_size": 576, "num_experts": 8, "moe_intermediate_size": 288}
    case = Case(tmp_path, model_type, **sizes)
    found = case.stream(case.least)
    streamer = found.streamer
    assert streamer.layers == frozenset(range(6))
    runner, layers = case.runner_of(found), case.layers
    for _ in range(2):
        logits(runner)
        # Behind a step the first two layers of the next one are read, and nothing else is left.
        streamer.settle()
        assert streamer.resident == {0, 1}
        held = resident(streamer.address)
        assert 0 < held <= layers[0].ahead + layers[1].ahead + 2 * AROUND
    runner.native.close()


@natively
def test_too_little_memory_is_refused_with_the_numbers(tmp_path: Path) -> None:
    case = Case(tmp_path, "llama")
    layer = case.layers[0].size
    with pytest.raises(ConfigurationError, match=f"is 1000 bytes, .* and {2 * layer} for the layer"):
        case.stream(1000)
    with pytest.raises(ConfigurationError, match=f"is {case.least - 1} bytes"):
        case.stream(case.least - 1)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * PAGE))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_a_disk_is_measured(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_rate(file, [Extent(100, 40 * PAGE)]) > 0
    monkeypatch.setattr(os, "O_DIRECT", 0)  # of a file system that does not read past its cache
    assert measure_rate(file, [Extent(0, 64 * PAGE)]) > 0

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "it is broken")

    monkeypatch.setattr(os, "preadv", fail)
    assert measure_rate(file, [Extent(0, 64 * PAGE)]) == 0.0


def test_layers_are_read_ahead_and_given_back_behind_the_step(file: int) -> None:
    pages = torch.from_file(f"/proc/self/fd/{file}", False, 64 * PAGE, dtype=torch.uint8)
    layers = {at: LayerExtents([Extent(at * 10 * PAGE, 10 * PAGE)], []) for at in (1, 3, 5)}
    with closing(WeightStreamer(pages, file, layers, 6, StreamedWeights(1, 1, 1.0))) as streamer:
        assert [streamer.prefetch_order(layer) for layer in range(7)] == [
            *((1, 3), (1, 3), (3, 5), (3, 5), (5, 1), (5, 1), (1, 3))
        ]
        for layer in (0, 1, 2, 3, 4, 5, 6, 2, 6):  # also faster than it looks
            streamer.place.layer = layer
            os.eventfd_write(streamer.place.doorbell, 1)
            streamer.settle()
            assert streamer.resident == {*streamer.prefetch_order(layer)}
        assert streamer.progress.count >= 6


def test_what_faults_have_brought_is_given_back_too(file: int) -> None:
    """A layer that was passed before the thread looked."""
    pages = torch.from_file(f"/proc/self/fd/{file}", False, 64 * PAGE, dtype=torch.uint8)
    layers = {at: LayerExtents([Extent(at * 10 * PAGE, 10 * PAGE)], []) for at in range(6)}
    with closing(WeightStreamer(pages, file, layers, 6, StreamedWeights(1, 1, 1.0))) as streamer:
        streamer.settle()
        assert int(pages[20 * PAGE : 40 * PAGE].sum()) > 0
        streamer.place.layer = 5
        os.eventfd_write(streamer.place.doorbell, 5)
        streamer.settle()
        assert streamer.resident == {5, 0}
        assert resident(pages.data_ptr()) <= 20 * PAGE + AROUND
