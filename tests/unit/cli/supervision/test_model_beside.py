"""A model that has to be converted is, while the services start."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from services.cli.supervision import up
from services.cli.supervision.stack import StackPlan
from services.cli.target import StackSettings
from shared.config import load_settings
from shared.errors import ModelLoadError
from shared.model_store.programs import Progress

FETCHED = ("downloading", "unpacking")


class Preparation:
    """Of a model that is in some stage until it is let go on."""

    def __init__(self, *stages: str, error: str = "") -> None:
        self.stages, self.error = stages, error
        self.reported = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, name: str, store: object, report: Progress) -> tuple[str, Path]:
        for stage in self.stages:
            report(stage, 0, 0)
        self.reported.set()
        await self.go_on.wait()
        if self.error:
            raise ModelLoadError(self.error)
        return "m", Path("/models/m")


class Stack:
    """Says what is started."""

    def __init__(self, plan: StackPlan) -> None:
        self.plan = plan
        self.nats_settings = StackSettings()
        self.children: list[Any] = []
        self.started: list[str] = []
        self.running = asyncio.Event()

    async def start(self, *, executors: bool = True) -> None:
        self.started.append("all" if executors else "services")
        self.running.set()

    async def start_executors(self, plan: StackPlan) -> None:
        self.plan = plan
        self.started.append(f"executors of {plan.model}")

    async def withdraw_models(self) -> None:
        raise InterruptedError  # what follows is not looked at


def make_up(directory: Path, monkeypatch: pytest.MonkeyPatch, preparation: Preparation) -> up.Up:
    monkeypatch.setattr(up, "prepare_model", preparation)
    plan = StackPlan(directory, "some", "", "127.0.0.1", 0, 1, 1, "auto")
    settings = load_settings(StackSettings, device="cpu", model_cache=directory)
    return up.Up(plan, settings, Console(quiet=True), smoke_test=False)


async def test_services_start_while_a_model_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preparation = Preparation(*FETCHED, "header")
    starting = make_up(tmp_path, monkeypatch, preparation)
    plan = await starting._prepare()
    assert plan.served_model_name == ""
    stack = Stack(plan)
    bringing = asyncio.create_task(starting._bring_up(stack))  # type: ignore[arg-type]
    await stack.running.wait()
    assert stack.started == ["services"]
    preparation.go_on.set()
    with pytest.raises(InterruptedError):
        await bringing
    assert stack.started == ["services", "executors of /models/m"]
    assert stack.plan.served_model_name == "m"


async def test_nothing_starts_before_a_model_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preparation = Preparation(*FETCHED)
    starting = make_up(tmp_path, monkeypatch, preparation)
    preparing = asyncio.create_task(starting._prepare())
    await preparation.reported.wait()
    assert not preparing.done()
    preparation.go_on.set()
    stack = Stack(await preparing)
    with pytest.raises(InterruptedError):
        await starting._bring_up(stack)  # type: ignore[arg-type]
    assert stack.started == ["all"]
    assert stack.plan.model == "/models/m"


async def test_what_keeps_a_model_from_being_converted_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation = Preparation("header", error="The file is damaged.")
    starting = make_up(tmp_path, monkeypatch, preparation)
    stack = Stack(await starting._prepare())
    preparation.go_on.set()
    with pytest.raises(ModelLoadError, match="damaged"):
        await starting._bring_up(stack)  # type: ignore[arg-type]
    assert stack.started == ["services"]


async def test_a_start_that_is_cancelled_ends_what_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preparation = Preparation("downloading")
    starting = make_up(tmp_path, monkeypatch, preparation)
    preparing = asyncio.create_task(starting._prepare())
    await preparation.reported.wait()
    preparing.cancel()
    await asyncio.wait([preparing])
    assert starting._model.cancelled()
