"""A real ring ends after a long text was spilled to disk: the next one reads it there, and says the same."""

from array import array
from pathlib import Path

import psutil
import pytest

from services.executor.kv_cache.prefix_index import BlockChain, root_digest
from services.executor.kv_cache.spill_file import HEADER_BYTES, Records
from shared.messages import GenerationRequest, Heartbeat, SamplingParams
from tests.integration.executor.rings import BLOCK, MODEL, Rings, Session, make_served_model
from tests.unit.executor.model.lanes import in_lanes

GROUP = "g"
TP = 2
MEMORY = 1 << 20  # of each rank's blocks: the longest text fits, and not two of them


def options(directory: Path) -> tuple[str, ...]:
    disk = ("--kv-disk-memory", str(16 << 20), "--kv-disk-directory", str(directory))
    return ("--tp", str(TP), "--kv-dtype", "int8", *disk)


def on_disk(directory: Path) -> set[bytes]:
    """Digests of the blocks that all ranks have written."""
    found = []
    for rank in range(TP):
        index = (directory / f"ryzanstein-kv-0-rank-{rank}.index").read_bytes()
        found.append({block.key.digest for block in Records(BLOCK).read(index[HEADER_BYTES:])})
    return set.intersection(*found)


def computed(session: Session) -> set[bytes]:
    """Digests of the full blocks of all that was said."""
    chain = BlockChain(array("i", session.tokens[: session.reusable]), BLOCK, root_digest(MODEL))
    return {chain.digest(block) for block in range(len(chain))}


async def spill(house: Rings, directory: Path, session: Session) -> None:
    """Others come until all of `session` has left the memory, and is written."""
    for number in range(6):
        await Session(house, f"other-{number}").turn(GROUP, 900)
    await house.processes[GROUP].wait_for(lambda beat: computed(session) <= on_disk(directory), timeout=30)


async def undisturbed(house: Rings, session: Session, answer: int) -> list[int]:
    """What a ring says to the session's last prompt that has never heard of it."""
    request = GenerationRequest(
        "undisturbed",
        "r",
        MODEL,
        "me",
        session.tokens[:-answer],
        max_tokens=answer,
        sampling=SamplingParams(temperature=0.0),
    )
    tokens, cached = await house.answer("h", request)
    assert cached == 0
    return tokens


async def end(house: Rings, model: Path, directory: Path, how: str) -> None:
    """A rank is killed, or the executor and all its ranks, or it is told to end; waits until the ring is back."""
    executor = house.processes[GROUP]
    if how != "killed rank":
        if how == "killed":
            house.kill_ring(GROUP)
        else:
            await house.leave(GROUP)
        await house.begin(GROUP, model, *options(directory), memory=MEMORY)
        await house.ready(GROUP, timeout=90)
        return
    beat = next(beat.group for beat in reversed(executor.beats) if beat.group is not None and beat.group.ranks)
    psutil.Process(beat.ranks[-1].pid).kill()

    def is_back(now: Heartbeat) -> bool:
        return now.group is not None and now.group.state == "ready" and now.group.epoch > beat.epoch

    await executor.wait_for(is_back, timeout=90)


@pytest.mark.parametrize("how", in_lanes(["killed rank", "killed", "drained"], (), ["killed rank"]))
async def test_a_long_text_comes_back_from_the_disk_of_a_ring_that_is_gone(
    house: Rings, tmp_path: Path, how: str
) -> None:
    model, directory = make_served_model(tmp_path / "model"), tmp_path / "kv"
    await house.begin(GROUP, model, *options(directory), memory=MEMORY)
    await house.begin("h", model, "--tp", str(TP), "--kv-dtype", "int8")
    await house.ready(GROUP, "h")
    session = Session(house, "long")
    assert await session.turn(GROUP, 800) == 0
    await spill(house, directory, session)
    await end(house, model, directory, how)
    reusable = session.reusable
    assert reusable >= 800
    assert await session.turn(GROUP, 20, answer=12) == reusable
    assert await undisturbed(house, session, 12) == session.tokens[-12:]
    log = house.processes[GROUP].log.read_text()
    assert log.count('"event": "kv_spill_recovered"') >= TP
    assert "kv_spill_discarded" not in log
