"""KV blocks in a mapped file: what is refused, and that nothing is lost or left behind."""

import resource
from pathlib import Path

import pytest
import torch

from services.executor.core.layer_state import attention, page_layers
from services.executor.kv_cache import block_memory
from services.executor.kv_cache.block_memory import MappedBlockFile, MappedFiles, file_system
from services.executor.kv_cache.codecs import INT8
from services.executor.kv_cache.store import KvStore
from services.executor.kv_cache.store_shape import StoreShape
from shared.errors import ConfigurationError
from tests.unit.executor.cpu.exact_ring import needs_disk
from tests.unit.executor.model.ring import CPU

PAGES = page_layers((attention(2, 32),) * 3)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    needs_disk(tmp_path)
    return tmp_path


def test_what_leaves_memory_comes_back(disk: Path) -> None:
    file = MappedBlockFile(disk / "new", 1 << 16)
    assert not file.content.any()
    assert not [*(disk / "new").iterdir()], "a file that has a name outlives its process"
    file.content.copy_(torch.arange(1 << 16).to(torch.uint8))
    for _ in range(2):
        file.drop()
        assert torch.equal(file.content, torch.arange(1 << 16).to(torch.uint8))
    content = file.content
    del file
    assert int(content[257]) == 1, "tensors keep what they need"


def test_a_disk_without_room_is_refused(disk: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ConfigurationError, match=rf"1048577 bytes for KV blocks .* in {disk} .*--kv-mapped-memory"):
            MappedBlockFile(disk, (1 << 20) + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*disk.iterdir()]


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="--kv-disk-directory"):
        MappedBlockFile(tmp_path / "file", 4096)


def test_a_directory_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:1 / /proc rw shared:3 - proc proc rw\n"
        f"23 1 {device >> 8 & 0xFFF}:{device & 0xFF} / /tmp rw,nosuid shared:7 master:2 - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(block_memory, "_MOUNTS", mounts)
    with pytest.raises(ConfigurationError, match=rf"{tmp_path} is in memory \(tmpfs\)"):
        MappedBlockFile(tmp_path, 4096)
    monkeypatch.setattr(block_memory, "_MOUNTS", tmp_path / "none")
    assert file_system(device) == ""


@pytest.mark.parametrize("codecs", [(INT8, None, INT8), ()], ids=["compressed", "as written"])
def test_a_store_keeps_codes_alone_in_the_file(disk: Path, codecs: tuple[object, ...]) -> None:
    shape = StoreShape(4, torch.bfloat16, PAGES, codecs, (), (0, 1, 2), is_mapped=True)  # type: ignore[arg-type]
    shape = shape.with_summaries()
    assert shape.moves_full_blocks
    files = MappedFiles(disk)
    store = KvStore(shape, 3, CPU, 5, files=files)
    assert files.nbytes == 5 * shape.bytes_per_mapped_block
    held = 5 * (shape.bytes_per_quantized_block - shape.bytes_per_mapped_block)
    assert store.nbytes == 3 * shape.bytes_per_block + held
    assert [store.is_mapped(layer) for layer in range(6)] == [True] * 3 + [False] * 3
    part = store.part(1, 2)
    assert part.is_mapped(0)
    assert part.codes(0).data_ptr() == store.codes(1).data_ptr()

    keys = torch.randn(4, 2, 32, dtype=torch.bfloat16)
    for layer in range(3):
        store.write(layer, torch.arange(4, 8), keys, -keys)
    store.compress([[1, 6]])
    before = store.save(6)
    assert any(before)
    files.drop()
    assert store.save(6) == before
