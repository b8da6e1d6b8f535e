"""A ring that leaves gives its sessions' KV blocks to a peer: two rings of real processes, rank by rank over TCP."""

from pathlib import Path

import pytest

from tests.integration.executor.rings import Rings, Session, make_served_model
from tests.unit.executor.model.lanes import in_lanes


@pytest.mark.parametrize(("tp", "kv_dtype"), in_lanes([(1, "int8"), (2, "bf16")], (), [(2, "bf16")]))
async def test_sessions_find_their_cache_at_the_peer(house: Rings, tmp_path: Path, tp: int, kv_dtype: str) -> None:
    model = make_served_model(tmp_path / "model")
    options = ("--tp", str(tp), "--kv-dtype", kv_dtype)
    await house.begin("a", model, *options)
    await house.begin("b", model, *options)
    await house.ready("a", "b")
    common = list(range(3, 19))
    sessions = [Session(house, f"s{number}", common) for number in range(6)]
    for number, session in enumerate(sessions):
        for turn in range(2):
            reusable = session.reusable
            assert await session.turn("a", 20 + 3 * number) == (reusable if turn else 16 if number else 0)
    await house.leave("a")
    for session in sessions:
        pin = await house.pin(session.name)
        assert pin.group == "b"
        reusable = session.reusable
        assert reusable >= 60
        assert await session.turn("b") == reusable, "as many as before"
