"""The files of an adapter go through the broker as they are, and are there as a whole or not at all."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import InternalError, PayloadTooLarge, StorageFull
from shared.nats import adapters
from shared.nats.adapters import CONFIG, WEIGHTS, AdapterFiles, job_holder, name_holder
from shared.nats.bus import Bus
from shared.nats.objects import MissingObject

DIGEST = "ab" * 32
A, B = name_holder("a"), job_holder("ftjob-1", 4)


@pytest.fixture
async def files(bus: Bus) -> AdapterFiles:
    store = AdapterFiles(bus)
    await store.open()
    return store


def directory(path: Path, config: bytes = b"{}", weights: bytes = b"w" * 300_000) -> Path:
    path.mkdir()
    (path / CONFIG).write_bytes(config)
    (path / WEIGHTS).write_bytes(weights)
    return path


async def test_files_come_back_as_they_were(files: AdapterFiles, tmp_path: Path) -> None:
    given, back = directory(tmp_path / "given"), tmp_path / "back"
    back.mkdir()
    assert not await files.has(DIGEST)
    await files.put(DIGEST, given, A)
    await files.put(DIGEST, directory(tmp_path / "other", b"[]"), A)  # of that digest there is one content
    await files.fetch(DIGEST, back)
    assert [(back / name).read_bytes() for name in (CONFIG, WEIGHTS)] == [b"{}", b"w" * 300_000]
    assert await files.size(DIGEST) == 300_000
    await files.release(DIGEST, A)
    for asked in (files.size(DIGEST), files.fetch(DIGEST, back)):
        with pytest.raises(MissingObject):
            await asked


async def test_what_is_too_large_or_empty_is_no_adapter(
    files: AdapterFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = tmp_path / "back"
    back.mkdir()
    await files.put(DIGEST, directory(tmp_path / "empty", weights=b""), A)
    with pytest.raises(InternalError, match=r"adapter_model\.safetensors is empty"):
        await files.fetch(DIGEST, back)
    await files.release(DIGEST, A)
    await files.put(DIGEST, directory(tmp_path / "large"), A)
    monkeypatch.setattr(adapters, "MAX_BYTES", 1000)
    with pytest.raises(PayloadTooLarge, match="more than 1,000 bytes"):
        await files.fetch(DIGEST, back)


async def subjects_of(bus: Bus) -> set[str]:
    """All that is in the store and in the bucket of holders."""
    found: set[str] = set()
    for stream in ("OBJ_adapters", "KV_adapter_files"):
        info = await bus.jetstream().stream_info(stream, subjects_filter=">")
        found |= set(info.state.subjects or {})
    return found


async def test_files_go_with_the_last_who_holds_them(files: AdapterFiles, bus: Bus, tmp_path: Path) -> None:
    """As two equal jobs do, or a job and the name of its model."""
    given, back = directory(tmp_path / "given"), tmp_path / "back"
    back.mkdir()
    await files.put(DIGEST, given, A)
    await files.put(DIGEST, given, B)
    await files.release(DIGEST, A)
    await files.release(DIGEST, A)
    await files.release(DIGEST, "nobody")
    await files.fetch(DIGEST, back)
    assert list((await files.holders())[DIGEST].holders) == [B]
    await files.release(DIGEST, B, since=1.0)
    assert await files.has(DIGEST), "it holds them anew since then"
    await files.release(DIGEST, B)
    assert await subjects_of(bus) == set()


async def test_a_deletion_takes_nothing_that_was_put_meanwhile(
    files: AdapterFiles, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late it comes, and at whichever of its steps it stood still."""
    given, back, steps = directory(tmp_path / "given"), tmp_path / "back", 0
    back.mkdir()
    while True:
        await files.put(DIGEST, given, A)
        with monkeypatch.context() as patched:
            stalled = Stalled(steps, AdapterFiles(bus), given)
            await stalled.files.open()
            for part, name in (
                (files._holders, "get"), (files._holders, "update"), (files._holders, "purge"),
                (files._objects, "version"), (files._objects, "writings"), (files._objects, "delete_version"),
                (files._objects, "purge"),
            ):  # fmt: skip
                patched.setattr(part, name, stalled.before(getattr(part, name)))
            await files.release(DIGEST, A)
        if not stalled.put:
            break
        await files.fetch(DIGEST, back)
        assert [(back / name).read_bytes() for name in (CONFIG, WEIGHTS)] == [b"{}", b"w" * 300_000]
        await files.release(DIGEST, B)
        assert await subjects_of(bus) == set()
        steps += 1
    assert steps > 8


class Stalled:
    """Before the call of that number somebody else puts the same files."""

    def __init__(self, calls: int, files: AdapterFiles, given: Path) -> None:
        self.left, self.files, self.given, self.put = calls, files, given, False

    def before(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def done(*args: Any, **named: Any) -> Any:
            if not self.left and not self.put:
                self.put = True
                await self.files.put(DIGEST, self.given, B)
            self.left -= 1
            return await call(*args, **named)

        return done


async def test_of_a_put_that_was_killed_nothing_stays(
    files: AdapterFiles, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = directory(tmp_path / "given")

    class Killed(BaseException):
        pass

    async def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(files._objects, "_write_meta", killed)
        patched.setattr(files._objects, "_try_to_purge", killed)
        with pytest.raises(Killed):
            await files.put(DIGEST, given, A)
    assert any(".C." in one for one in await subjects_of(bus))
    await files.release(DIGEST, A)
    assert await subjects_of(bus) == set()


async def test_what_finds_no_room_is_held_by_nobody(
    files: AdapterFiles, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **__: object) -> int:
        raise StorageFull("It is full.")

    monkeypatch.setattr(files._objects, "write", full)
    with pytest.raises(StorageFull):
        await files.put(DIGEST, directory(tmp_path / "given"), A)
    assert await subjects_of(bus) == set()
