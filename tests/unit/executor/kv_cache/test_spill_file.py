"""Spilled blocks in files with names: what is found again is what was written there, or nothing."""

import os
import zlib
from pathlib import Path

import pytest
import structlog
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.collectives.base import SingleRank
from services.executor.kv_cache import spill_file
from services.executor.kv_cache.offload import DiskSlots, SpillStore
from services.executor.kv_cache.prefix_index import (
    BlockKey,
    block_digest,
    root_digest,
    salted_root,
    state_key,
    with_choice,
)
from services.executor.kv_cache.spill_file import (
    HEADER_BYTES,
    KeptBlock,
    Records,
    SpillFile,
    SpillPlace,
    agreed,
    recover,
    take,
)
from tests.unit.executor.model.ring import on_ring

SIZE = 64
BLOCK = 4
CPU = torch.device("cpu")
ROOT = root_digest("m")


def key(name: int, parent: bytes = ROOT) -> BlockKey:
    tokens = name.to_bytes(4, "little") * BLOCK
    return BlockKey(block_digest(parent, tokens), parent, tokens)


def content(name: int) -> bytes:
    return bytes([name % 256]) * SIZE


def place_of(directory: Path, rank: int = 0, world_size: int = 1, slots: int = 8, kind: bytes = b"a") -> SpillPlace:
    return SpillPlace(directory, rank, world_size, kind * 32, BLOCK, SIZE, slots)


def begun(place: SpillPlace) -> tuple[DiskSlots, list[KeptBlock]]:
    """The slots of a ring of one rank that starts."""
    file, blocks = recover(place, CPU, SingleRank())
    assert file is not None
    disk = DiskSlots(SIZE, place.directory)
    disk.keep_in(file, blocks)
    return disk, blocks


def killed(disk: DiskSlots) -> None:
    """What the end of its process leaves: files that are unlocked, with all that was written."""
    disk.flush()
    disk.close()


KEYS = st.one_of(
    st.integers(0, 255).map(key),
    st.integers(0, 255).map(lambda name: key(name, salted_root(ROOT, "tenant", "ab" * 16))),
    st.integers(0, 255).map(lambda part: state_key(key(1).digest, part)),
    st.integers(0, 255).map(lambda name: key(name)._replace(tokens=with_choice(key(name).tokens, bytes(16)))),
)
BLOCKS = st.builds(KeptBlock, st.just(0), KEYS, st.integers(0, 2**32 - 1), st.integers(1, 2**63))


@given(st.lists(st.none() | BLOCKS, max_size=6), st.data())
def test_records_come_back_and_damaged_ones_do_not(blocks: list[KeptBlock | None], data: st.DataObject) -> None:
    """Whatever is cut off or changed of an index, each of its blocks is one that was written to that slot."""
    records = Records(BLOCK)
    wanted = [block and block._replace(slot=10 + at) for at, block in enumerate(blocks)]
    index = b"".join(records.pack(block) if block else bytes(records.size) for block in wanted)
    assert list(records.read(index, 10)) == [block for block in wanted if block]
    cut = data.draw(st.integers(0, len(index)))
    assert list(records.read(index[:cut], 10)) == [block for block in wanted[: cut // records.size] if block]
    damaged = bytearray(index)
    hit = data.draw(st.sets(st.integers(0, max(0, len(index) - 1)), max_size=3)) if index else set()
    for at in hit:
        damaged[at] ^= data.draw(st.integers(1, 255))
    rows = {at // records.size for at in hit}
    assert list(records.read(bytes(damaged), 10)) == [
        block for row, block in enumerate(wanted) if block and row not in rows
    ]


def test_a_key_that_is_none_of_these_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="belongs to none of these"):
        Records(BLOCK).pack(KeptBlock(0, key(0)._replace(tokens=bytes(400)), 0, 1))


def test_what_was_written_is_there_when_the_ring_starts_again(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    disk, blocks = begun(place)
    assert blocks == []
    for slot, name in ((3, 1), (0, 2), (5, 3), (3, 4)):
        disk.save(slot, content(name), key(name))
        disk.flush()
    disk.save(6, content(9))
    killed(disk)
    with structlog.testing.capture_logs() as logs:
        disk, blocks = begun(place)
    assert [(block.slot, block.key) for block in blocks] == [(0, key(2)), (5, key(3)), (3, key(4))]
    assert [disk.load(slot) for slot in (0, 5, 3, 6)] == [content(2), content(3), content(4), None]
    [told] = logs
    assert (told["event"], told["blocks"], told["dropped"]) == ("kv_spill_recovered", 3, 0)
    disk.save(0, content(5), key(5))
    killed(disk)
    _, blocks = begun(place)
    assert [block.key for block in blocks] == [key(3), key(4), key(5)], "the order goes on"
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


@pytest.mark.parametrize("step", range(3))
def test_a_rank_that_is_killed_while_it_writes_leaves_no_wrong_block(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the three writes that replace a block, so many are made, half of the last of them."""
    place = place_of(tmp_path)
    disk, _ = begun(place)
    disk.save(0, content(1), key(1))
    disk.save(1, content(2), key(2))
    disk.flush()
    write, made = os.pwrite, [0]

    def dying(file: int, data: bytes, offset: int) -> int:
        made[0] += 1
        if made[0] <= step:
            return write(file, data, offset)
        write(file, bytes(data)[: len(data) // 2], offset)
        raise OSError("killed")

    monkeypatch.setattr(os, "pwrite", dying)
    disk.save(0, content(3), key(3))
    killed(disk)
    monkeypatch.undo()
    disk, blocks = begun(place)
    found = {block.key: disk.load(block.slot) for block in blocks}
    assert found == {key(2): content(2)}, "neither the old nor the new one is whole"


def test_bytes_that_the_host_has_lost_are_a_miss(tmp_path: Path) -> None:
    """As after a loss of power: records without their bytes."""
    place = place_of(tmp_path)
    disk, _ = begun(place)
    for slot in range(3):
        disk.save(slot, content(slot + 1), key(slot))
    killed(disk)
    blocks = place.path(0, "blocks")
    with blocks.open("r+b") as file:
        file.truncate(2 * SIZE)
        file.write(bytes(SIZE // 2))
    disk, found = begun(place)
    assert [block.slot for block in found] == [0, 1]
    assert [disk.load(slot) for slot in range(3)] == [None, content(2), None]


def test_files_of_another_kind_are_discarded_and_that_is_said(tmp_path: Path) -> None:
    disk, _ = begun(place_of(tmp_path))
    disk.save(0, content(1), key(1))
    killed(disk)
    with structlog.testing.capture_logs() as logs:
        disk, blocks = begun(place_of(tmp_path, kind=b"b"))
    assert [told["event"] for told in logs] == ["kv_spill_discarded"]
    assert blocks == []
    assert place_of(tmp_path).path(0, "blocks").stat().st_size == 0, "its room is free at once"
    killed(disk)
    assert begun(place_of(tmp_path))[1] == []


def test_fewer_slots_keep_what_is_in_the_first_ones(tmp_path: Path) -> None:
    disk, _ = begun(place_of(tmp_path, slots=8))
    for slot in range(8):
        disk.save(slot, content(slot), key(slot))
        disk.flush()
    killed(disk)
    disk, blocks = begun(place_of(tmp_path, slots=3))
    assert [block.slot for block in blocks] == [0, 1, 2]
    assert place_of(tmp_path).path(0, "blocks").stat().st_size == 3 * SIZE
    killed(disk)
    assert len(begun(place_of(tmp_path, slots=8))[1]) == 3


def test_two_rings_of_a_directory_never_share_a_file(tmp_path: Path) -> None:
    first, _ = begun(place_of(tmp_path))
    first.save(0, content(1), key(1))
    second, blocks = begun(place_of(tmp_path))
    assert blocks == []
    second.save(0, content(2), key(2))
    for disk, name in ((first, 1), (second, 2)):
        disk.flush()
        assert disk.load(0) == content(name)
    assert SpillFile.open(place_of(tmp_path), 0) is None
    killed(second)
    other, blocks = begun(place_of(tmp_path, kind=b"b"))
    assert blocks == []
    killed(other)
    killed(first)
    file = take(place_of(tmp_path))
    assert file.number == 0, "the one of its kind, not the first that is free"
    assert [block.key for block in file.read()] == [key(1)]
    assert place_of(tmp_path).numbers() == [0, 1], "as many as there were rings at once"


def test_ranks_agree_on_what_all_of_them_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_file, "_SLOTS_PER_SUM", 3)
    held = [{0: 1, 1: 2, 4: 3, 7: 9}, {0: 1, 1: 5, 4: 3, 6: 7}]
    with_all = [
        [KeptBlock(slot, key(name), rank, 9 - slot) for slot, name in mine.items()] for rank, mine in enumerate(held)
    ]
    found = on_ring(2, lambda member: agreed(with_all[member.rank], 8, CPU, member))
    assert [[(block.slot, block.key) for block in blocks] for blocks in found] == [[(0, key(1)), (4, key(3))]] * 2
    found = on_ring(2, lambda member: agreed(with_all[0] if member.rank else [], 8, CPU, member))
    assert found == [[], []]


def test_a_ring_of_two_finds_its_blocks_again(tmp_path: Path) -> None:
    def life(member: object, slots: dict[int, int]) -> list[KeptBlock]:
        rank = member.rank  # type: ignore[attr-defined]
        file, blocks = recover(place_of(tmp_path, rank, 2), CPU, member)  # type: ignore[arg-type]
        assert file is not None
        disk = DiskSlots(SIZE, tmp_path)
        disk.keep_in(file, blocks)
        for slot, name in slots.items():
            disk.save(slot, content(name + rank), key(name))
        disk.flush()
        assert all(disk.load(block.slot) is not None for block in blocks)
        killed(disk)
        return blocks

    on_ring(2, lambda member: life(member, {1: 1, 2: 2}))
    on_ring(2, lambda member: life(member, {2: 3} if member.rank else {}))
    found = on_ring(2, lambda member: life(member, {}))
    assert [[block.key for block in blocks] for blocks in found] == [[key(1)]] * 2
    disk, blocks = begun(place_of(tmp_path))
    assert blocks == [KeptBlock(1, key(1), zlib.crc32(content(1)), 1), KeptBlock(2, key(2), zlib.crc32(content(2)), 2)]
    assert not place_of(tmp_path, rank=1).numbers(), "a ring of one has no second rank"
    killed(disk)


def test_a_rank_without_its_file_goes_on_without(tmp_path: Path) -> None:
    other = SpillFile.open(place_of(tmp_path, rank=1, world_size=2), 0)
    assert other is not None

    def life(member: object) -> tuple[SpillFile | None, list[KeptBlock]]:
        return recover(place_of(tmp_path, member.rank, 2), CPU, member)  # type: ignore[attr-defined, arg-type]

    with structlog.testing.capture_logs() as logs:
        (leader, _), (follower, _) = on_ring(2, life)
    assert (leader is None, follower is None) == (False, True)
    assert [told["event"] for told in logs] == ["kv_spill_save_failed"]


def test_what_is_not_a_file_of_this_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(tmp_path)
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    place.path(0, "index").symlink_to(tmp_path / "elsewhere")
    place.path(1, "index").mkdir()
    file, _ = recover(place, CPU, SingleRank())
    assert file.number == 2
    file.close()
    assert (tmp_path / "elsewhere").read_bytes() == b"theirs"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with structlog.testing.capture_logs() as logs:
        assert recover(place, CPU, SingleRank()) == (None, [])
    assert [told["event"] for told in logs] == ["kv_spill_save_failed"]


def test_a_pair_of_which_half_cannot_be_opened_is_not_used(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    place.path(0, "blocks").mkdir()
    with structlog.testing.capture_logs() as logs:
        assert recover(place, CPU, SingleRank()) == (None, [])
    assert [told["event"] for told in logs] == ["kv_spill_save_failed"]
    place.path(0, "blocks").rmdir()
    assert recover(place, CPU, SingleRank())[0] is not None, "and is free again"


def test_an_index_that_cannot_be_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, _ = begun(place_of(tmp_path))
    disk.save(0, content(1), key(1))
    killed(disk)
    read = os.pread

    def broken(file: int, count: int, offset: int) -> bytes:
        if offset:
            raise OSError("Input/output error")
        return read(file, count, offset)

    monkeypatch.setattr(os, "pread", broken)
    with structlog.testing.capture_logs() as logs:
        assert recover(place_of(tmp_path), CPU, SingleRank()) == (None, [])
    assert [told["event"] for told in logs] == ["kv_spill_save_failed"]


def test_files_of_ranks_that_a_ring_has_not_are_removed_where_nobody_uses_them(tmp_path: Path) -> None:
    used = SpillFile.open(place_of(tmp_path, rank=2, world_size=3), 0)
    idle = SpillFile.open(place_of(tmp_path, rank=1, world_size=3), 0)
    assert used is not None
    idle.close()
    begun(place_of(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".blocks")
    assert names == ["ryzanstein-kv-0-rank-0.blocks", "ryzanstein-kv-0-rank-2.blocks"]


def test_an_index_that_cannot_be_written_loses_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = place_of(tmp_path)
    disk, _ = begun(place)
    write = os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        return write(file, bytes(data)[:1], offset) if offset >= HEADER_BYTES else write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    disk.save(0, content(1), key(1))
    disk.flush()
    assert disk.load(0) is None
    killed(disk)
    monkeypatch.undo()
    assert begun(place)[1] == []


def test_a_store_keeps_the_keys_of_what_it_saves_to_disk(tmp_path: Path) -> None:
    spill = SpillStore(1, 2, SIZE, tmp_path)
    file, blocks = recover(place_of(tmp_path), CPU, SingleRank())
    assert file is not None
    spill.disk.keep_in(file, blocks)
    spill.save(0, content(1), key(1))
    spill.save(1, content(1), key(1))
    spill.disk.flush()
    spill.close()
    spill.close()
    assert [(block.slot, block.key) for block in begun(place_of(tmp_path))[1]] == [(0, key(1))]
