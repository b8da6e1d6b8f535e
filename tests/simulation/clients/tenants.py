"""Tenants that make trouble for others: each client is a fault (`faults/kinds.py`), with a key of its own.

flooding   sends many requests with large prompts at once
poison     a batch, one line of which ends every gateway that computes it
filling    fills its quotas until it is refused, and makes room again after a while
"""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from services.gateway.batches.line_runner import LineRunner
from services.gateway.batches.lines import BatchLine as LineRequest
from shared.messages.batches import BatchJob, LineResult
from tests.simulation.clients.ask import QUOTA, Refused
from tests.simulation.clients.history import Filled
from tests.simulation.clients.jobs import FILES, JOBS, Batches, Long, examples, form
from tests.simulation.clients.whole import Whole

LARGE = 4_500  # characters of each prompt of a flood: more tokens than a tenant's turn at the scheduler has
POISON = b"poison"  # in the prompt of such a line
BEYOND = 2  # what two gateways may admit beyond a quota within the moment that news take
HELD = (5.0, 20.0)  # seconds for which quotas stay filled, from and to


class Flooding(Whole):
    kind: ClassVar[str] = "flooding"

    async def once(self) -> None:
        await asyncio.gather(*(self._one() for _ in range(self.draw.randint(*self.plan.size))))

    async def _one(self) -> None:
        body, wanted = self.chat(may_stop=False)
        body["messages"][0]["content"] = "x" * LARGE
        await self.answered(self.request(body, wanted, self.fresh_key()))


class Poison(Batches):
    kind: ClassVar[str] = "poison"
    may_be_cancelled: ClassVar[bool] = False

    def made(self) -> tuple[dict[str, str], list[Any], tuple[str, ...], str, str]:
        wanted, lines = self.lines()
        line = self.draw.choice(lines)
        line["body"]["prompt"] = POISON.decode()
        return wanted, lines, ("completed",), "24h", line["custom_id"]


def watch_poison(lost: Callable[[str], bool]) -> None:
    """From now on, in this process: a gateway that computes a poisonous line ends. `lost` is told the batch's id, and
    says whether it does."""
    compute = LineRunner._result

    async def result(self: LineRunner, job: BatchJob, request: LineRequest, endpoint: Any) -> LineResult:
        if POISON in bytes(request.body) and lost(job.id):
            raise SystemExit(-9)
        return await compute(self, job, request, endpoint)

    LineRunner._result = result  # type: ignore[method-assign]


class Filling(Long):
    """`size`: files that a tenant may have, and fine-tuning jobs."""

    kind: ClassVar[str] = "filling"

    async def once(self) -> None:
        files, jobs = self.plan.size
        examples_file = await self.upload("fine-tune", examples(1, (2, 4)))
        made = [await self._fill("jobs", jobs, lambda: self._job(examples_file))]
        made.append(await self._fill("files", files, self._file))
        await asyncio.sleep(self.draw.uniform(*HELD))
        for identity in made[0]:
            await self.change(f"{JOBS}/{identity}/cancel")
        for identity in made[1]:
            await self._remove(identity)

    async def _fill(self, what: str, most: int, one: Callable[[], tuple[str, Any, dict[str, str]]]) -> list[str]:
        """The ids of what was made until no more was admitted."""
        made, filled = list[str](), Filled(self.name, self.around.tenant, what, most, self.around.now)
        self.history.filled.append(filled)
        while filled.made < most + BEYOND + 1:
            try:
                reply, _ = await self.around.insist("POST", *one(), final=QUOTA)
            except Refused as error:
                if error.code != QUOTA:
                    self.wrong(f"{what} were refused: {error}")
                filled.refused = True
                break
            made.append(str(reply.json()["id"]))
            filled.made += 1
        return made

    def _file(self) -> tuple[str, Any, dict[str, str]]:
        body, headers = form("batch", f"{self.name}.jsonl", b"{}\n")
        return FILES, body, headers

    def _job(self, file: str) -> tuple[str, Any, dict[str, str]]:
        key = f"{self.name}-{self.draw.getrandbits(48):x}"
        return JOBS, {"model": self.around.model, "training_file": file}, {"Idempotency-Key": key}

    async def _remove(self, identity: str) -> None:
        try:
            await self.around.insist("DELETE", f"{FILES}/{identity}")
        except Refused as error:
            if error.status != 404:  # an earlier try has done it
                self.wrong(f"{identity} could not be deleted: {error}")
