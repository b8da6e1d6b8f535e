"""Summaries, scores and choices of blocks, held against PyTorch's."""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the GPU kernels are tested where Triton is (Linux on x86-64)")

from benchmarks.on_gpu.device import interprets
from services.executor.gpu.kernels import pages
from services.executor.gpu.kernels.attention_launch import AttentionLayer
from services.executor.gpu.kernels.pages import ChosenRows
from services.executor.kv_cache.codecs import COMPRESSING, Codec

DEVICE = torch.device("cpu" if interprets() else "cuda")
HEADS, GROUP, SIZE, WIDTH, WRITABLE, QUANTIZED = 2, 3, 4, 24, 30, 40


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def int32(*values: object) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32)).to(DEVICE)


def layers(codec: Codec | None) -> tuple[AttentionLayer, AttentionLayer]:
    """Keys and values in blocks, and room for their summaries."""
    writable = normal(WRITABLE, 2, HEADS, SIZE, WIDTH).bfloat16()
    quantized = normal(QUANTIZED if codec else 0, 2, HEADS, SIZE, WIDTH, seed=1)
    codes, scales = codec.encode(quantized.flatten(-2)) if codec else (quantized.bfloat16(), None)
    own = AttentionLayer(writable, codes.view(quantized.shape), scales, codec)
    rooms = (torch.zeros(count, 2, HEADS, 1, WIDTH, device=DEVICE) for count in (WRITABLE, len(quantized)))
    return own, AttentionLayer(*(room.bfloat16() for room in rooms), None, None)


@pytest.mark.parametrize("codec", [None, *COMPRESSING], ids=str)
def test_summaries_are_of_the_blocks_that_are_filled_as_they_are_kept(codec: Codec | None) -> None:
    own, summaries = layers(codec)
    pairs = torch.tensor([(3, 7), (4, 39)], device=DEVICE) if codec else None
    # Rows at the ends of blocks 7 and 29, one that is not, and one that only fills up a graph's batch.
    positions, slots = int32(11, 3, 10, 3), int32(7 * SIZE + 3, 29 * SIZE + 3, 2 * SIZE + 2, -1)

    pages.summarise(own, summaries, pairs, positions, slots)

    filled, written = ([7, 39], summaries.codes) if codec else ([7, 29], summaries.writable)
    keys = own.writable.float()
    if codec is not None:
        assert own.scales is not None
        keys = codec.decode(own.codes.flatten(-2), own.scales).view(own.codes.shape).float()
    keys = keys[filled, 0]
    expected = torch.stack((keys.mean(2), keys.std(2, unbiased=False)), 1)
    torch.testing.assert_close(written[filled, :, :, 0].float(), expected, rtol=2**-7, atol=2**-7)
    others = [block for block in range(len(written)) if block not in filled]
    assert not written[others].any()


def rows_of(most: int, length: int, *choices: tuple[int, ...]) -> ChosenRows:
    """Of two sequences, whose tables follow each other: one goes through the writable blocks, one through the
    quantized."""
    tables = [*reversed(range(WRITABLE)), *range(WRITABLE, WRITABLE + QUANTIZED)]
    return ChosenRows(int32(*tables), int32(*choices), most, length)


def expected_scores(query: Tensor, summaries: AttentionLayer, blocks: Tensor) -> Tensor:
    """float64 [heads, blocks] of `query` [heads, group, d]."""
    kept = torch.cat((summaries.writable, summaries.codes)).double()[blocks.long(), :, :, 0]  # [n, 2, heads, d]
    mean, deviation = kept.permute(1, 2, 0, 3)
    rows = query.double()
    return (rows @ mean.mT + 1.5 * (rows.abs() @ deviation.mT)).amax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_score_is_the_highest_of_a_heads_queries(dtype: torch.dtype) -> None:
    query = normal(3, HEADS, GROUP, WIDTH, seed=2).to(dtype)
    summaries = AttentionLayer(
        normal(WRITABLE, 2, HEADS, 1, WIDTH, seed=3).abs().to(dtype),
        normal(QUANTIZED, 2, HEADS, 1, WIDTH, seed=4).abs().to(dtype),
        None,
        None,
    )
    # Row 2 through writable blocks alone, row 0 through quantized ones; row 1 has a window, which scores nothing.
    rows = rows_of(25, 30, (2, 0, 1, 26, 3, 28), (1, 0, 1, 9, 0, 12), (0, WRITABLE, 2, 12, 5, 30))
    scores = torch.full((3, HEADS, 25), -7.0, device=DEVICE)
    chosen = torch.zeros((3, HEADS, 30), dtype=torch.int32, device=DEVICE)
    scoring, _ = pages.choose_calls(query, summaries, rows, 1.5, scores, chosen)

    scoring.run()

    for index, row, first, count in ((0, 2, 1, 25), (2, 0, WRITABLE + 2, 10)):
        expected = expected_scores(query[row], summaries, rows.tables[first : first + count])
        torch.testing.assert_close(scores[index, :, :count].double(), expected, rtol=1e-6, atol=1e-6)
        assert scores[index, :, count:].eq(-7).all()
    assert scores[1].eq(-7).all()


@pytest.mark.parametrize("block", [16, 64])
def test_the_best_are_chosen_and_of_those_that_tie_the_earlier(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores of all sizes and signs, some of them alike; tables keep the order of the text."""
    monkeypatch.setattr(pages, "CHOSEN", block)
    count, tops = 53, [1, 7, 26, 52]
    scores = normal(len(tops), HEADS, count) * torch.exp(6 * normal(len(tops), HEADS, count, seed=1))
    scores[:, 0] = scores[:, 0].round(decimals=0).clamp(-3, 3)
    scores[1, 1] = torch.where(scores[1, 1] > 0, 0.0, -0.0)
    scores[2, 1, 5] = float("inf")
    rows = rows_of(count, 70, *((0, 0, 2, 2 + count, top, 2 + count + 5) for top in tops))
    query = normal(1, HEADS, GROUP, WIDTH)
    chosen = torch.full((len(tops), HEADS, 70), -1, dtype=torch.int32, device=DEVICE)
    summaries = AttentionLayer(query.new_zeros(WRITABLE, 2, HEADS, 1, WIDTH), query.new_zeros(0), None, None)
    *_, choosing = pages.choose_calls(query, summaries, rows, 1.0, scores, chosen)

    choosing.run()

    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    table = rows.tables.tolist()
    for at, top in enumerate(tops):
        for head in range(HEADS):
            best = sorted(order[at, head, :top].tolist())
            places = [0, 1, *(2 + place for place in best), *range(2 + count, 2 + count + 6)]
            found = chosen[at, head].tolist()
            assert found == [*(table[place] for place in places), *[-1] * (70 - len(places))]
