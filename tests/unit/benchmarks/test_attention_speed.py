"""What the speed of attention is counted in."""

import pytest

pytest.importorskip("triton", reason="attention's speed is measured where Triton is")

from benchmarks.on_gpu.attention_speed import GROUP, KV_HEADS, WIDTH, Load


def test_a_decode_reads_every_block_once() -> None:
    plain = 2 * 1024 * 2 * KV_HEADS * WIDTH * 2
    assert Load(2, 1, 1024, "bf16", 1024).bytes_read == plain
    compressed = Load(2, 1, 1024, "fp8", 16).bytes_read
    assert plain / 2 < compressed < plain * 0.52


def test_a_row_is_multiplied_with_the_keys_that_it_sees() -> None:
    assert Load(1, 4, 4, "bf16", 4).operations == 4 * (1 + 2 + 3 + 4) * KV_HEADS * GROUP * WIDTH
    assert Load(3, 2, 10, "bf16", 10).operations == 3 * 4 * (9 + 10) * KV_HEADS * GROUP * WIDTH
