"""The files of an adapter go through the broker as they are, and are there as a whole or not at all."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.errors import InternalError, PayloadTooLarge
from shared.nats import adapters
from shared.nats.adapters import CONFIG, WEIGHTS, AdapterFiles
from shared.nats.bus import Bus
from shared.nats.objects import MissingObject

DIGEST = "ab" * 32


@pytest.fixture
async def files(bus: Bus) -> AsyncIterator[AdapterFiles]:
    store = AdapterFiles(bus)
    await store.open()
    yield store
    await store.delete(DIGEST)


def directory(path: Path, config: bytes = b"{}", weights: bytes = b"w" * 300_000) -> Path:
    path.mkdir()
    (path / CONFIG).write_bytes(config)
    (path / WEIGHTS).write_bytes(weights)
    return path


async def test_files_come_back_as_they_were(files: AdapterFiles, tmp_path: Path) -> None:
    given, back = directory(tmp_path / "given"), tmp_path / "back"
    back.mkdir()
    assert not await files.has(DIGEST)
    await files.put(DIGEST, given)
    await files.put(DIGEST, directory(tmp_path / "other", b"[]"))  # of that digest there is one content
    await files.fetch(DIGEST, back)
    assert [(back / name).read_bytes() for name in (CONFIG, WEIGHTS)] == [b"{}", b"w" * 300_000]
    assert await files.size(DIGEST) == 300_000
    await files.delete(DIGEST)
    for asked in (files.size(DIGEST), files.fetch(DIGEST, back)):
        with pytest.raises(MissingObject):
            await asked


async def test_what_is_too_large_or_empty_is_no_adapter(
    files: AdapterFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = tmp_path / "back"
    back.mkdir()
    await files.put(DIGEST, directory(tmp_path / "empty", weights=b""))
    with pytest.raises(InternalError, match=r"adapter_model\.safetensors is empty"):
        await files.fetch(DIGEST, back)
    await files.delete(DIGEST)
    await files.put(DIGEST, directory(tmp_path / "large"))
    monkeypatch.setattr(adapters, "MAX_BYTES", 1000)
    with pytest.raises(PayloadTooLarge, match="more than 1,000 bytes"):
        await files.fetch(DIGEST, back)
