"""A ring that stands still while it loads is taken down long before its time to start is over."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.executor.core.settings import ExecutorSettings
from services.executor.ipc.board import RingBoard
from services.executor.supervisor import group
from services.executor.supervisor.failure_detection import LoadWatch
from services.executor.supervisor.service import ExecutorService
from shared.config import load_settings


async def test_it_is_lost_with_the_rank_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LoadWatch", lambda: LoadWatch(limit=0.5))
    board = RingBoard(tmp_path / "board", 1, create=True)
    board.rank(0).loaded(1, 4)
    lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ring: Any = SimpleNamespace(epoch=1, ready=asyncio.Event(), board=board, lose=lost.set_result)
    settings = load_settings(ExecutorSettings, engine="stub", hung_after=1.0)
    supervisor = group.GroupSupervisor(settings, "g", ExecutorService(settings))
    supervisor._ring = ring
    watching = asyncio.create_task(supervisor._watch_progress())
    try:
        async with asyncio.timeout(30):
            assert "has read nothing for 0.5 s, after 25% of its weights" in await lost
    finally:
        watching.cancel()
