"""`python -m tests.compatibility`: writes docs/openai-compatibility.md, and beside it, not committed, the tables of
every parameter. With `--url` it asks a running server.
"""

import argparse
import asyncio
import contextlib
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.compatibility.page import Count, page, tables
from tests.compatibility.probe import Found, Prober
from tests.e2e.stack import Stack

PAGE = Path(__file__).parents[2] / "docs" / "openai-compatibility.md"
TABLES = PAGE.with_name("openai-parameters.md")
STUB = ("--engine", "stub", "--no-smoke-test")
REASONING = (*STUB, "--reasoning-parser", "think")  # it reasons where the prompt ends so
# It fails on `operations.FAULT`, and has streams under way when it ends.
FAILING: dict[str, Any] = {
    "RYZANSTEIN_STUB_FAULT": "error",
    "RYZANSTEIN_STUB_STEP_MS": "20",
    "RYZANSTEIN_DRAIN_TIMEOUT": "0.1",
}


# A fine-tuning job for each parameter that is tried out.
MANY_JOBS = {"RYZANSTEIN_TENANT_TRAINING_JOBS": "1000"}


async def found_at(
    url: str, reasoning_url: str = "", failing_url: str = "", end: Callable[[], None] | None = None
) -> list[Found]:
    """`reasoning_url`: of a server whose model reasons; empty: the same. `failing_url`: of one that fails where it is
    asked to, and that `end` tells to end; empty: none."""
    bases = (url, reasoning_url or url, failing_url)
    async with contextlib.AsyncExitStack() as stack:
        http, reasoning, failing = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=base, timeout=60, trust_env=False))
            for base in bases
        ]
        return await Prober(http, reasoning, failing if failing_url else None, end).probe()


def found_on_a_stack(directory: Path) -> list[Found]:
    """On stacks of their own with the stub engine."""
    with (
        Stack(directory / "plain", *STUB, **MANY_JOBS) as stack,
        Stack(directory / "reasoning", *REASONING) as reasoning,
        Stack(directory / "failing", *STUB, **FAILING) as failing,
    ):
        end = partial(failing.process.send_signal, signal.SIGTERM)
        return asyncio.run(found_at(stack.url, reasoning.url, failing.url, end))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a running server whose model is called stub")
    url = parser.parse_args().url
    if url:
        found = asyncio.run(found_at(url))
    else:
        with tempfile.TemporaryDirectory() as directory:
            found = found_on_a_stack(Path(directory))
    PAGE.write_text(page(found, openai.__version__))
    TABLES.write_text(tables(found, openai.__version__))
    count = Count(row for one in found for row in one.parameters)
    print(  # noqa: T201  # a command's result
        f"{PAGE}: {count.honoured} of {count.all} parameters taken ({count.share_of_all}); of the {count.meant} with a "
        f"meaning here {count.share_of_meant}; {count.missing} missing."
    )


if __name__ == "__main__":
    main()
