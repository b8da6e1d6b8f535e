"""Which profiles there cannot be, and why."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.executor.core.settings import ExecutorSettings
from services.executor.supervisor.diagnostics.service import refusal
from shared.messages.debugging import ProfileCommand


def ring(*, ready: bool) -> Any:
    event = asyncio.Event()
    if ready:
        event.set()
    return SimpleNamespace(ready=event)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (ProfileCommand(), ""),
        (ProfileCommand(ranks=[2]), "has no rank 2; its ranks are 0 to 1"),
        (ProfileCommand(steps=501), "at most 500 steps or 60 s; ask for less"),
        (ProfileCommand(seconds=61.0), "at most 500 steps or 60 s; ask for less"),
        (ProfileCommand(steps=0), "give --steps or --seconds"),
        (ProfileCommand(timeout=0.0), "must be above 0 s and at most 600 s"),
    ],
)
def test_a_profile_is_within_its_bounds(command: ProfileCommand, why: str) -> None:
    found = refusal(command, ExecutorSettings(model="m", tp=2), ring(ready=True), "g")
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize("lost", [None, ring(ready=False)], ids=["no ring", "starting"])
def test_without_a_ring_nothing_is_profiled(lost: Any) -> None:
    assert "has no ring that is ready" in refusal(ProfileCommand(), ExecutorSettings(model="m"), lost, "g")
