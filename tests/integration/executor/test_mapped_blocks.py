"""A group whose KV blocks lie in a file: the same text as with all of them in memory, and a disk that fails costs a
ring, nothing else."""

import contextlib
import os
from pathlib import Path

import pytest

from services.executor.native.library import why_not
from shared.errors import RyzansteinError
from shared.messages import GenerationRequest, Heartbeat, SamplingParams, SparseAttention
from tests.integration.executor.rings import VOCABULARY, Rings, make_served_model, request_of
from tests.unit.executor.cpu.exact_ring import needs_disk

PAGES = SparseAttention(threshold=64, sinks=8, recent=16, budget=32, share=0.0, dense_layers=1)
MEMORY = {"file": "2097152", "memory": "0"}  # bytes of the file, by group


def requests_of(group: str, first: int = 0) -> list[GenerationRequest]:
    """Two that read all, and two that choose; with another number of the `first` the same under other names."""
    found = []
    for number, sparse in enumerate((None, PAGES, None, PAGES)):
        sampling = SamplingParams(temperature=1.0, seed=number)
        one = request_of(group, first + number, 1, max_tokens=24, sampling=sampling, sparse=sparse)
        one.prompt[:] = [3 + (number * 31 + at * 7) % (VOCABULARY - 3) for at in range(300 + number)]
        found.append(one)
    return found


def cut_files(house: Rings, group: str) -> int:
    """The blocks of the group's ranks are nowhere any more, as on a disk that has failed; returns how many files."""
    beats = house.processes[group].beats
    beat = next(beat.group for beat in reversed(beats) if beat.group is not None and beat.group.ranks)
    cut = set()
    for rank in beat.ranks:
        for link in Path(f"/proc/{rank.pid}/fd").iterdir():
            if "ryzanstein-kv-" in str(link.readlink()):
                os.truncate(link, 0)
                cut.add(link.readlink())
    return len(cut)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    needs_disk(tmp_path)
    return make_served_model(tmp_path / "model", head_dim=32, num_hidden_layers=3)


def names_in(directory: Path) -> list[str]:
    return [file.name for file in directory.iterdir()]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"native kernels: {why_not()}")
async def test_a_group_reads_blocks_from_a_file_and_outlives_it(house: Rings, tmp_path: Path, model: Path) -> None:
    disk, texts = tmp_path / "disk", {}
    for group, size in MEMORY.items():
        own = ("--tp", "2", "--collectives", "shm", "--dtype", "bf16", "--sparse-attention")
        own += ("--kv-mapped-memory", size, "--kv-disk-directory", str(disk), "--max-sequences", "4")
        await house.begin(group, model, *own, "--max-batch-tokens", "64", memory=8 << 20)
        await house.ready(group, timeout=90)
        await house.hand_in(group, requests_of(group))
        texts[group] = await house.texts(requests_of(group))
    assert texts["file"] == texts["memory"]
    assert all(tokens for tokens, _ in texts["file"])
    assert not names_in(disk), "a file that has a name outlives its process"
    assert "kv_blocks_mapped" in house.processes["file"].log.read_text()

    process = house.processes["file"]
    epoch = max(beat.group.epoch for beat in process.beats if beat.group is not None)
    assert cut_files(house, "file") == 2
    with contextlib.suppress(RyzansteinError):  # what it says may be lost with it
        await house.hand_in("file", requests_of("file", 4))

    def is_back(beat: Heartbeat) -> bool:
        return beat.group is not None and beat.group.state == "ready" and beat.group.epoch > epoch

    await process.wait_for(is_back, timeout=90)
    await house.hand_in("file", requests_of("file", 8))
    assert await house.texts(requests_of("file", 8)) == texts["file"]
