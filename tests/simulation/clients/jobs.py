"""Clients of what takes long: batches of requests, and fine-tuning jobs.

file ──▶ job ──▶ looks at it now and then, cancels or pauses it sometimes ──▶ over ──▶ reads all that came of it
"""

import asyncio
import json
import random
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar

from services.executor.worker.stub import adapted
from tests.chaos.expected import stub_text
from tests.simulation.clients.ask import Refused
from tests.simulation.clients.client import Client, take_whole
from tests.simulation.clients.history import BatchSeen, JobSeen, Wanted

FILES, BATCHES, JOBS = "/v1/files", "/v1/batches", "/v1/fine_tuning/jobs"
ADAPTERS = "/v1/loras"
# Seconds after which a gateway that was cut off lists what others have made (docs/reliability.md).
LISTED_WITHIN = 5.0
OVER = ("completed", "failed", "expired", "cancelled", "succeeded")
# Of batches, the shares of those with a line that is no request, and of those that may run out of time.
WRONG, HURRIED = 0.1, 0.15
_BOUNDARY = "simulated-form"


def form(purpose: str, name: str, data: bytes) -> tuple[bytes, dict[str, str]]:
    """The body of an upload, and its headers."""
    parts = (
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n'
        "content-type: application/jsonl\r\n\r\n"
    )
    body = parts.encode() + data + f"\r\n--{_BOUNDARY}--\r\n".encode()
    return body, {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}


class Long(Client):
    """What batches and jobs have in common."""

    async def upload(self, purpose: str, lines: Sequence[Any]) -> str:
        """The file's id."""
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        body, headers = form(purpose, f"{self.name}-{self._number}.jsonl", data)
        reply, gateway = await self.around.insist("POST", FILES, body, headers)
        return self.acknowledged("file", str(reply.json()["id"]), gateway).identity

    async def create(self, path: str, body: Any) -> tuple[dict[str, Any], str]:
        """What was made, under a key; and by which gateway."""
        key = f"{self.name}-{self._number}-{self.draw.getrandbits(48):x}"
        reply, gateway = await self.around.insist("POST", path, body, {"Idempotency-Key": key})
        return reply.json(), gateway

    async def look(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.around.insist("GET", path))[0].json()
        return found

    async def content(self, file: str) -> bytes:
        return (await self.around.insist("GET", f"{FILES}/{file}/content"))[0].body

    async def change(self, path: str) -> bool:
        """Cancels, pauses, resumes. Whether it was taken; what is over, or in another state, refuses it."""
        try:
            await self.around.insist("POST", path, {})
        except Refused as error:
            if error.status != 409:
                self.wrong(f"{path} was refused: {error}")
            return False
        return True


class Batches(Long):
    kind: ClassVar[str] = "batches"
    may_be_cancelled: ClassVar[bool] = True

    def made(self) -> tuple[dict[str, str], list[Any], tuple[str, ...], str, str]:
        """Texts that are wanted, lines, how it may end, the window, and the line that is fatal."""
        wanted, lines = self.lines()
        chance = self.draw.random()
        if chance < WRONG:
            return wanted, [*lines, "this is no request"], ("failed",), "24h", ""
        if chance < WRONG + HURRIED:
            return wanted, lines, ("completed", "expired"), f"{self.draw.randint(3, 30)}s", ""
        return wanted, lines, ("completed",), "24h", ""

    async def once(self) -> None:
        wanted, lines, ends, window, fatal = self.made()
        file = await self.upload("batch", lines)
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": window}
        made, gateway = await self.create(BATCHES, body)
        batch = BatchSeen(
            self.name, made["id"], self.around.tenant, wanted, started=self.around.now, ends=ends, fatal=fatal
        )
        self.acknowledged("batch", batch.identity, gateway)
        self.history.batches.append(batch)
        cancels = self.draw.random() < 0.15 and self.may_be_cancelled
        cancel_at = self.around.now + self.draw.uniform(0, 60.0) if cancels else None
        shown = made
        while True:
            if batch.statuses[-1:] != [shown["status"]]:
                batch.statuses.append(shown["status"])
            batch.status, batch.counts = shown["status"], shown["request_counts"]
            if batch.status in OVER:
                break
            await asyncio.sleep(self.draw.uniform(*self.plan.wait))
            if cancel_at is not None and self.around.now >= cancel_at and not batch.cancel_asked:
                batch.cancel_asked = await self.change(f"{BATCHES}/{batch.identity}/cancel")
            shown = await self.look(f"{BATCHES}/{batch.identity}")
        batch.output = await self._results(shown["output_file_id"])
        batch.errors = await self._results(shown["error_file_id"])
        batch.ended = self.around.now

    def lines(self) -> tuple[dict[str, str], list[dict[str, Any]]]:
        wanted, lines = {}, []
        for number in range(self.draw.randint(*self.plan.size)):
            name = f"line-{number}"
            body, seed, tokens = self.prompted(self.around.model)
            wanted[name] = stub_text(seed, tokens)
            lines.append({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body})
        return wanted, lines

    async def _results(self, file: str | None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (await self.content(file)).splitlines()] if file else []


class Training(Long):
    """The adapter's content follows from seed and examples alone: of jobs that are alike, some are disturbed and some
    are not, and all have the same."""

    kind: ClassVar[str] = "training"

    async def once(self) -> None:
        seed, lines = self.draw.randint(1, 2), examples(self.draw.randint(1, 2), self.plan.size)
        file = await self.upload("fine-tune", lines)
        method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 2}}}
        body = {"model": self.around.model, "training_file": file, "method": method, "seed": seed}
        made, gateway = await self.create(JOBS, body)
        job = JobSeen(self.name, made["id"], self.around.tenant, seed, _number(lines), started=self.around.now)
        self.acknowledged("job", job.identity, gateway)
        self.history.jobs.append(job)
        await self._follow(job, made)
        job.events, job.steps = await self._events(job)
        if job.status == "succeeded":
            await self._use(job)
        job.ended = self.around.now

    async def _follow(self, job: JobSeen, shown: dict[str, Any]) -> None:
        """Until it is over; pauses it, goes on with it, cancels it now and then."""
        path = f"{JOBS}/{job.identity}"
        while True:
            if job.statuses[-1:] != [shown["status"]]:
                job.statuses.append(shown["status"])
            job.status = shown["status"]
            if job.status in OVER:
                break
            await asyncio.sleep(self.draw.uniform(*self.plan.wait))
            chance = self.draw.random()
            if job.status == "paused":
                await self.change(f"{path}/resume")
            elif chance < 0.05:
                await self.change(f"{path}/pause")
            elif chance < 0.07:
                job.cancel_asked = await self.change(f"{path}/cancel") or job.cancel_asked
            shown = await self.look(path)
        job.model, job.results = shown.get("fine_tuned_model") or "", shown.get("result_files") or []

    async def _events(self, job: JobSeen) -> tuple[list[str], list[int]]:
        """Messages, and the steps told of, in the order in which they came."""
        found: list[dict[str, Any]] = []
        while True:
            after = f"&after={found[-1]['id']}" if found else ""
            page = await self.look(f"{JOBS}/{job.identity}/events?limit=100{after}")
            found += page["data"]
            if not page["has_more"]:
                break
        found.reverse()
        steps = [int(one["data"]["step"]) for one in found if (one.get("data") or {}).get("step")]
        return [str(one["message"]) for one in found], steps

    async def _use(self, job: JobSeen) -> None:
        """The adapter is there at once for who names it, is listed soon, once, and answers."""
        for file in job.results:
            await self.content(file)
        try:
            job.digest = (await self.look(f"{ADAPTERS}/{job.model}"))["digest"]
        except Refused as error:
            self.wrong(f"{job.model} was refused: {error}")
            return
        until = self.around.now + LISTED_WITHIN
        while not job.names_of_adapters and self.around.now < until:
            listed = (await self.look(ADAPTERS))["data"]
            job.names_of_adapters = [one["id"] for one in listed if one["id"] == job.model]
            await asyncio.sleep(0 if job.names_of_adapters else LISTED_WITHIN / 10)
        await self._ask(job)

    async def _ask(self, job: JobSeen) -> None:
        body, seed, tokens = self.prompted(job.model)
        wanted = Wanted(stub_text(adapted(seed, job.digest), tokens), tokens)
        request = self.request(body, wanted, f"{self.name}-{self._number}-adapter")

        async def send(gateway: str, tried: Any) -> None:
            headers = {"Idempotency-Key": request.key}
            take_whole(request, (await self.around.ask(gateway, "POST", "/v1/completions", body, headers)).json())

        await self.until_answered(request, send)


def examples(seed: int, size: tuple[int, int]) -> list[dict[str, Any]]:
    """Conversations of two messages: the same for the same seed, so that jobs of several clients are alike."""
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choices("abcdefgh ijklm nopq", k=draw.randint(5, 40))) + "."

    return [
        {"messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]}
        for _ in range(max(2, draw.randint(*size)))
    ]


def _number(lines: list[dict[str, Any]]) -> int:
    """The same for the same lines."""
    return zlib.crc32(json.dumps(lines).encode())
