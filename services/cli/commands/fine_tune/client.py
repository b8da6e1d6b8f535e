"""`/v1/fine_tuning/jobs` of a gateway, and what its objects say."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from rich.console import Console

from services.cli.gateway_client import GatewayClient, ServerEvent, patiently, save
from shared.errors import ConfigurationError, RyzansteinError, Unavailable, UnknownModel
from shared.messages.training import TRAINING_OVER

Job = dict[str, Any]  # as `GET /v1/fine_tuning/jobs/{id}` shows it
Event = dict[str, Any]
Checkpoint = dict[str, Any]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
JOBS = "/v1/fine_tuning/jobs"
_PAGE = 100
_MAX_PAGES = 200  # of one list: a server that never says that it is at its end is not read for ever


class FineTuningClient:
    """Methods raise `Refused` with the gateway's words, and `Unavailable` where none answers."""

    def __init__(self, gateway: GatewayClient) -> None:
        self._gateway = gateway

    async def file(self, given: str, screen: Console | None) -> str:
        """The id of the file `given`: a path, which is uploaded, or an id. Raises `ConfigurationError`."""
        if (path := _existing(given)) is not None:
            uploaded = await self._gateway.upload(path, "fine-tune", screen)
            return str(uploaded["id"])
        if given.startswith("file-"):
            return given
        raise ConfigurationError(
            f"{given[:200]} is neither a file here nor the id of an uploaded one (file-...); give a file of JSON lines."
        )

    async def create(self, body: dict[str, Any]) -> Job:
        key = {"Idempotency-Key": secrets.token_hex(16)}
        return await self._gateway.ask("POST", JOBS, json=body, headers=key)

    async def get(self, job: str) -> Job:
        return await self._gateway.ask("GET", _path(job))

    async def act(self, job: str, action: str) -> Job:
        """`action`: cancel, pause or resume."""
        return await self._gateway.ask("POST", f"{_path(job)}/{action}")

    async def listed(self, limit: int) -> list[Job]:
        """The newest."""
        found: list[Job] = (await self._gateway.ask("GET", JOBS, params={"limit": limit}))["data"]
        return found

    async def checkpoints(self, job: str) -> list[Checkpoint]:
        """The earliest first."""
        found = [one async for page in self._pages(f"{_path(job)}/checkpoints") for one in page]
        return sorted(found, key=lambda one: int(one["step_number"]))

    async def events(self, job: str, most: int) -> list[Event]:
        """The newest ones, the earliest of them first."""
        found: list[Event] = []
        async for page in self._pages(f"{_path(job)}/events"):
            found += page
            if len(found) >= most:
                break
        return found[:most][::-1]

    async def follow(self, job: str) -> AsyncGenerator[Event, None]:
        """Its events as they are written, from the first on, until it is over; a gateway that goes is waited for."""
        events = _EventStream(self._gateway, f"{_path(job)}/events?stream=true")
        while (event := await patiently(lambda: anext(events, None))) is not None:
            yield event

    async def _pages(self, path: str) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Of a list of OpenAI's, the newest first."""
        after = ""
        for _ in range(_MAX_PAGES):
            params = {"limit": str(_PAGE), **({"after": after} if after else {})}
            page = await self._gateway.ask("GET", path, params=params)
            if page["data"]:
                yield page["data"]
            if not page["has_more"]:
                return
            after = page["data"][-1]["id"]

    async def download(self, job: str, name: str, checkpoint: int, target: Path) -> None:
        """One of `ADAPTER_FILES`; `checkpoint`: its step, 0: the result."""
        query = f"?checkpoint={checkpoint}" if checkpoint else ""
        await save(self._gateway.content(f"{_path(job)}/adapter/{name}{query}"), target)

    async def find(self, name: str) -> tuple[Job, int]:
        """The job `name`, or the one that has made the model `name`, and of a checkpoint's its step, else 0. Raises
        `UnknownModel`."""
        if not name.startswith("ft:"):
            return await self.get(name), 0
        model, _, step = name.partition(":ckpt-step-")
        unnamed: list[Job] = []
        async for page in self._pages(JOBS):
            for job in page:
                if job["fine_tuned_model"] == model:
                    return job, int(step) if step.isdecimal() else 0
                unnamed += [] if job["fine_tuned_model"] else [job]
        for job in unnamed if step else ():
            for checkpoint in await self.checkpoints(job["id"]):
                if checkpoint["fine_tuned_model_checkpoint"] == name:
                    return job, int(checkpoint["step_number"])
        raise UnknownModel(
            f"None of your jobs produced the model {name!r}; `ryzanstein fine-tune list` shows your jobs."
        )


def _path(job: str) -> str:
    return f"{JOBS}/{quote(job, safe='')}"


def _existing(given: str) -> Path | None:
    try:
        path = Path(given).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # no name of a file, or of a user
        return None


class _EventStream(AsyncIterator[Event]):
    """Its events. One that could not be read may be asked for again: the stream is resumed behind the last."""

    def __init__(self, gateway: GatewayClient, path: str) -> None:
        self._gateway, self._path = gateway, path
        self._last = ""
        self._events: AsyncGenerator[ServerEvent, None] | None = None

    async def __anext__(self) -> Event:
        events = self._events = self._events or self._gateway.events(self._path, self._last)
        try:
            async for event in events:
                self._last = event.id or self._last
                return _event_of(event.data)
        except RyzansteinError:
            self._events = None
            await events.aclose()
            raise
        raise StopAsyncIteration


def _event_of(data: str) -> Event:
    """Raises `Unavailable` with the gateway's words where it ends the stream by them."""
    event: Event = msgspec.json.decode(data)
    if "error" in event:
        raise Unavailable(str(event["error"]["message"]))
    return event


def is_over(job: Job) -> bool:
    return job["status"] in TRAINING_OVER


def what_is_wrong(job: Job) -> str:
    """Of a job that has failed: its words, and whether there are checkpoints to go on with."""
    error = job["error"] or {}
    where = f" ({error['param']})" if error.get("param") else ""
    return f"{error.get('message') or 'it gives no reason'}{where}"
