"""What a fine-tuning job costs those who are answered on the same host: `python -m benchmarks.training.beside_serving`.

    beside a job ──▶ alone (the job is paused) ──▶ alone ──▶ beside a job ──▶ ...        each phase: the same load

Interactive streams come at random times (Poisson), so that most of them find the trainer at work: it is suspended while
they run, and goes on between them. First tokens and gaps of all phases of a kind are taken together. Without `--url` a
stack of its own is started, on the built-in model or on `--model`.
"""

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer

from benchmarks.errors import BenchError
from benchmarks.harness import Rounds, Sheet, machine, run, show, turns
from benchmarks.serve.runner import Target, choose_model, run_round, server_measure
from benchmarks.serve.sse import Client
from benchmarks.serve.stats import Sample, gaps, percentile
from benchmarks.serve.workloads import WORDS, PromptSource, Workload, calibrate, sessions
from benchmarks.start import stack_of
from shared.model_store.catalog import DEFAULT_MODEL

JOBS = "/v1/fine_tuning/jobs"
PATIENCE = 300.0
"""Seconds for the job to come to a state."""
LOOK = 0.2
GOALS = {0.5: 0.05, 0.99: 0.15}
"""How much later each share of first tokens and gaps may come."""
BESIDE, ALONE = "beside a job", "alone"


@dataclass
class Kind:
    """What was measured in the phases of a kind."""

    samples: list[Sample] = field(default_factory=list)
    steps: int = 0
    """Of the job, meanwhile."""
    seconds: float = 0.0

    def first_token(self, share: float) -> float:
        """Milliseconds, of those requests that were answered."""
        return percentile([one.first_token for one in self.samples], share) * 1e3

    def gap(self, share: float) -> float:
        """Milliseconds between two tokens."""
        found = [gaps(one) for one in self.samples]
        return (
            percentile(
                [gap for some, _ in found for gap in some], share, [n for _, some in found for n in some]
            )
            * 1e3
        )


class Job:
    """A fine-tuning job that is never done while it is looked at."""

    def __init__(self, http: httpx.AsyncClient, content: Mapping[str, Any]) -> None:
        self._http, self.id = http, str(content["id"])
        self._content = content

    @classmethod
    async def created(cls, http: httpx.AsyncClient, model: str, examples: int) -> "Job":
        lines = b"".join(msgspec.json.encode(line) + b"\n" for line in conversations(examples))
        answer = await http.post(
            "/v1/files", data={"purpose": "fine-tune"}, files={"file": ("chats.jsonl", lines)}
        )
        _check(answer)
        supervised = {"hyperparameters": {"n_epochs": 50, "batch_size": 8}}
        body = {
            "model": model,
            "training_file": answer.json()["id"],
            "method": {"type": "supervised", "supervised": supervised},
        }
        answer = await http.post(JOBS, json=body)
        _check(answer)
        return cls(http, answer.json())

    @property
    def step(self) -> int:
        return int((self._content["progress"] or {}).get("step", 0))

    async def look(self) -> None:
        answer = await self._http.get(f"{JOBS}/{self.id}")
        _check(answer)
        self._content = answer.json()
        if self._content["status"] in ("failed", "succeeded", "cancelled"):
            said = (self._content["error"] or {}).get("message", "nothing more is said")
            raise BenchError(f"The job {self.id} is {self._content['status']}: {said}.")

    async def until(self, holds: Callable[[Mapping[str, Any]], bool], what: str) -> None:
        with_patience = time.monotonic() + PATIENCE
        while not holds(self._content):
            if time.monotonic() > with_patience:
                why = self._content["waiting_for"] or "no reason is given"
                raise BenchError(f"The job {self.id} is not {what} after {PATIENCE:g} s: {why}.")
            await asyncio.sleep(LOOK)
            await self.look()

    async def run(self) -> None:
        """Until it has made a step."""
        if self._content["wanted"] == "pause" or self._content["status"] == "paused":
            _check(await self._http.post(f"{JOBS}/{self.id}/resume"))
        await self.look()
        before = self.step
        await self.until(lambda now: now["status"] == "running" and self.step > before, "running")

    async def rest(self) -> None:
        """Until its trainer has ended."""
        if self._content["status"] != "paused":
            _check(await self._http.post(f"{JOBS}/{self.id}/pause"))
        await self.look()
        await self.until(lambda now: now["status"] == "paused", "paused")

    async def cancel(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            await self._http.post(f"{JOBS}/{self.id}/cancel")


def conversations(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Lines of a training file, of about 230 tokens each."""
    draw = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(draw.choices(WORDS, k=max(4, round(words * draw.lognormvariate(0, 0.6)))))

    roles = (("user", 60), ("assistant", 120))
    return [
        {"messages": [{"role": role, "content": text(words)} for role, words in roles]} for _ in range(count)
    ]


def _check(answer: httpx.Response) -> None:
    if answer.is_error:
        raise BenchError(
            f"{answer.request.url.path} answered HTTP {answer.status_code}: {answer.text[:300].strip()}"
        )


async def measure(url: str, workload: Workload, rounds: int, examples: int) -> dict[str, Kind]:
    """By their names. Raises `BenchError`."""
    kinds = {BESIDE: Kind(), ALONE: Kind()}
    client = Client(url, timeout=120.0)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as http:
        target = Target(client, await choose_model(client, None), {})
        source = PromptSource(await calibrate(server_measure(target), turns=False), 1)
        job = await Job.created(http, target.model, examples)
        try:
            await job.run()
            for at, (_, name) in enumerate(turns((BESIDE, ALONE), rounds)):
                await (job.run() if name == BESIDE else job.rest())
                # The first requests of a phase are not counted: what the other one left in caches is gone then.
                few = workload.resized(requests=max(2, workload.requests // 8))
                await _phase(target, few, source, f"w{at}")
                before, began = job.step, time.monotonic()
                samples = await _phase(target, workload, source, str(at))
                await job.look()
                kind = kinds[name]
                kind.samples += samples
                kind.steps += job.step - before
                kind.seconds += time.monotonic() - began
                typer.echo(f"phase {at + 1} of {2 * rounds}: {name}, {len(samples)} streams", err=True)
        finally:
            await job.cancel()
            client.close()
    return kinds


async def _phase(target: Target, workload: Workload, source: PromptSource, label: str) -> list[Sample]:
    samples: list[Sample] = []
    # The same arrivals in all phases.
    await run_round(
        target, workload, sessions(workload, source, label), arrival_seed=1, on_request=samples.append
    )
    if failed := [one.error for one in samples if one.error is not None]:
        raise BenchError(f"{len(failed)} of {len(samples)} streams failed: {failed[0]}")
    return samples


def sheet(kinds: Mapping[str, Kind]) -> Sheet:
    rows = []
    for name, kind in kinds.items():
        steps = f"{kind.steps} steps in {kind.seconds:.0f} s"
        figures = [measure(share) for measure in (kind.first_token, kind.gap) for share in GOALS]
        rows.append((f"{len(kind.samples)} {name}", steps, *(f"{one:.2f} ms" for one in figures)))
    columns = (f"{what} p{share * 100:.0f}" for what in ("first token", "gap") for share in GOALS)
    return Sheet(("streams", "job", *columns), rows)


def verdicts(kinds: Mapping[str, Kind]) -> list[str]:
    """What a job adds to each figure, and whether that is as little as it should be."""
    beside, alone = kinds[BESIDE], kinds[ALONE]
    lines = []
    for what, of in (("first token", Kind.first_token), ("gap", Kind.gap)):
        for share, most in GOALS.items():
            more = of(beside, share) / of(alone, share) - 1
            met = "met" if more <= most else "not met"
            lines.append(f"{met}: {what} at p{share * 100:.0f} {more:+.1%} beside a job; {most:.0%} or less")
    return lines


@contextmanager
def gateway_of(url: str, model: str) -> Iterator[str]:
    """The address of a gateway: `url`, or of a stack of its own."""
    if url:
        yield url
        return
    with (
        tempfile.TemporaryDirectory(prefix="ryzanstein-beside-") as scratch,
        stack_of(Path(scratch), model or DEFAULT_MODEL, None, []) as stack,
    ):
        stack.wait_ready()
        yield stack.url


def main(
    url: Annotated[str, typer.Option(help="Of a gateway; empty: a stack of its own.")] = "",
    model: Annotated[str, typer.Option(help="Of the own stack; empty: the built-in one.")] = "",
    requests: Annotated[int, typer.Option(help="Streams of a phase.", min=2)] = 100,
    rate: Annotated[float, typer.Option(help="Of them in a second.", min=0.01)] = 1.5,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=32)] = 128,
    tokens: Annotated[int, typer.Option(help="Of an answer.", min=2)] = 32,
    rounds: Rounds = 3,
    examples: Annotated[int, typer.Option(help="Of the job's file.", min=10)] = 500,
) -> None:
    """First token and gap of interactive streams, with and without a fine-tuning job on the same host."""
    workload = Workload("beside", 1, requests, prompt, tokens, rate=rate)
    with gateway_of(url, model) as gateway:
        kinds = asyncio.run(measure(gateway, workload, rounds, examples))
    about = f"{machine()}; {rate:g} streams a second, {prompt} tokens in, {tokens} out"
    show(about, sheet(kinds), *verdicts(kinds))


if __name__ == "__main__":
    run(main)
