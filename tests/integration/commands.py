"""`ryzanstein`'s commands of a group, in a thread of this process and on the test's NATS."""

import asyncio
import json
from collections.abc import Collection
from typing import Any

from typer import Typer
from typer.testing import CliRunner, Result

from shared.config import CommonSettings
from tests.processes import nats_address


class Command:
    """`patient`: of the group's commands those that wait, here for 30 seconds at most."""

    def __init__(self, app: Typer, nats: CommonSettings, patient: Collection[str] = ()) -> None:
        self._app, self._patient = app, patient
        self._url = nats_address(nats)

    async def invoke(self, *arguments: str, text: str | None = None) -> Result:
        limit = ("--timeout", "30") if arguments[0] in self._patient and "--timeout" not in arguments else ()
        given = [*arguments, *limit, "--nats-url", self._url]
        return await asyncio.to_thread(CliRunner().invoke, self._app, given, input=text)

    async def run(self, *arguments: str, text: str | None = None) -> str:
        """Its output. Raises what it ends with."""
        result = await self.invoke(*arguments, text=text)
        if result.exception is not None:
            raise result.exception
        return result.stdout

    async def json(self, *arguments: str) -> Any:
        return json.loads(await self.run(*arguments, "--json"))
