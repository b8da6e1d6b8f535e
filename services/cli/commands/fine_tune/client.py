"""`/v1/fine_tuning/jobs` of a gateway, and what its objects say."""

import secrets
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.gateway_client import GatewayClient, patiently
from shared.errors import ConfigurationError, UnknownModel
from shared.messages.training import TRAINING_OVER

Job = dict[str, Any]
"""As `GET /v1/fine_tuning/jobs/{id}` shows it."""
Event = dict[str, Any]
Checkpoint = dict[str, Any]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
JOBS = "/v1/fine_tuning/jobs"
_PAGE = 100
_MAX_PAGES = 200
"""Of one list: a server that never says that it is at its end is not read for ever."""


class FineTuning:
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
            f"{given} is neither a file here nor the id of an uploaded one (file-...); give a file of JSON lines."
        )

    async def create(self, body: dict[str, Any]) -> Job:
        key = {"Idempotency-Key": secrets.token_hex(16)}
        return await self._gateway.ask("POST", JOBS, json=body, headers=key)

    async def get(self, job: str) -> Job:
        return await self._gateway.ask("GET", f"{JOBS}/{job}")

    async def act(self, job: str, action: str) -> Job:
        """`action`: cancel, pause or resume."""
        return await self._gateway.ask("POST", f"{JOBS}/{job}/{action}")

    async def listed(self, limit: int) -> list[Job]:
        """The newest."""
        found: list[Job] = (await self._gateway.ask("GET", JOBS, params={"limit": limit}))["data"]
        return found

    async def checkpoints(self, job: str) -> list[Checkpoint]:
        """The earliest first."""
        found = [one async for page in self._pages(f"{JOBS}/{job}/checkpoints") for one in page]
        return sorted(found, key=lambda one: int(one["step_number"]))

    async def new_events(self, job: str, known: set[str]) -> list[Event]:
        """Those that are not `known`, which then are; the earliest first. A gateway that restarts is waited for."""
        found: list[Event] = []
        pages = self._pages(f"{JOBS}/{job}/events")
        while (page := await patiently(lambda: anext(pages, None))) is not None:
            fresh = [one for one in page if one["id"] not in known]
            known.update(one["id"] for one in fresh)
            found += fresh
            if len(fresh) < len(page):
                break
        return found[::-1]

    def _pages(self, path: str) -> "Pages":
        return Pages(self._gateway, path)

    async def download(self, job: str, name: str, checkpoint: int, target: Path) -> None:
        """One of `ADAPTER_FILES`; `checkpoint`: its step, 0: the result."""
        query = f"?checkpoint={checkpoint}" if checkpoint else ""
        await self._gateway.download(f"{JOBS}/{job}/adapter/{name}{query}", target)

    async def made(self, name: str) -> tuple[Job, int]:
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
            f"No job of yours has made the model {name!r}; `ryzanstein fine-tune list` shows your jobs."
        )


def _existing(given: str) -> Path | None:
    path = Path(given).expanduser()
    return path if path.exists() else None


class Pages(AsyncIterator[list[dict[str, Any]]]):
    """A list of OpenAI's, page by page; a page that could not be read may be asked for again."""

    def __init__(self, gateway: GatewayClient, path: str) -> None:
        self._gateway, self._path = gateway, path
        self._after, self._read, self._has_more = "", 0, True

    async def __anext__(self) -> list[dict[str, Any]]:
        if not self._has_more or self._read == _MAX_PAGES:
            raise StopAsyncIteration
        params = {"limit": str(_PAGE), **({"after": self._after} if self._after else {})}
        page = await self._gateway.ask("GET", self._path, params=params)
        found: list[dict[str, Any]] = page["data"]
        self._read += 1
        self._has_more = bool(page["has_more"] and found)
        self._after = found[-1]["id"] if found else ""
        return found


def is_over(job: Job) -> bool:
    return job["status"] in TRAINING_OVER


def what_is_wrong(job: Job) -> str:
    """Of a job that has failed: its words, and whether there are checkpoints to go on with."""
    error = job["error"] or {}
    where = f" ({error['param']})" if error.get("param") else ""
    return f"{error.get('message') or 'it gives no reason'}{where}"


def local_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
