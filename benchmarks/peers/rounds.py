"""Runs the schedule: one server at a time, the load client on it, and what was found.

Rounds are interleaved: every peer once, then every peer again. So a machine that slows down for a while slows
all of them down, and the median over rounds forgets it.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.progress import Progress, TaskID

from benchmarks.errors import BenchError
from benchmarks.peers import catalog
from benchmarks.peers.catalog import Peer, Place
from benchmarks.peers.results import PeerResult
from benchmarks.peers.servers import Server, free_port, wait_ready
from benchmarks.serve.__main__ import Plan, run_to_end
from benchmarks.serve.sse import Client
from benchmarks.serve.stats import Summary
from benchmarks.serve.workloads import Vocabulary, Workload
from services.executor.model.conversion.convert import convert
from shared.errors import RyzansteinError


@dataclass(frozen=True, slots=True)
class Step:
    """One start of one server."""

    round: int
    peer: Peer
    slots: int
    workloads: tuple[Workload, ...]


def schedule(peers: Sequence[Peer], workloads: Sequence[Workload], rounds: int) -> list[Step]:
    """All steps in order. A peer is started once a round, or once for each number of slots that it needs."""
    return [step for at in range(rounds) for peer in peers for step in _steps_of_round(peer, workloads, at)]


def gguf_path(folder: Path, model: Path, weights: str) -> Path:
    """Where the file of this model, with these very weights, belongs in `folder`."""
    newest = max((file.stat().st_mtime_ns for file in model.iterdir()), default=0)
    return folder / f"{model.name}-{newest:x}-{weights}.gguf"


def _steps_of_round(peer: Peer, workloads: Sequence[Workload], at: int) -> list[Step]:
    by_slots: dict[int, list[Workload]] = {}
    for workload in workloads:
        by_slots.setdefault(peer.slots_for(workload.clients), []).append(workload)
    return [Step(at, peer, slots, tuple(group)) for slots, group in by_slots.items()]


def prompt_seed(seed: int, at: int, workload: str) -> int:
    """The seed of a workload's prompts: the same for every peer of a round, another in every round."""
    return seed + 1_000_003 * at + sum(byte << (8 * place) for place, byte in enumerate(workload.encode()))


@dataclass(frozen=True, slots=True)
class Contest:
    """What is to be compared, and how."""

    model: Path
    peers: Sequence[Peer]
    workloads: Sequence[Workload]
    rounds: int
    threads: int
    seed: int
    work: Path  # environments, GGUF files and logs are kept here
    vocabulary: Vocabulary
    ready_timeout: float = 300.0
    request_timeout: float = 600.0


@dataclass(slots=True)
class Run:
    """The state of a run; `results` can be read at any time."""

    contest: Contest
    progress: Progress
    say: Callable[[str], None]
    results: dict[str, PeerResult] = field(default_factory=dict)
    _prepared: dict[str, Place] = field(default_factory=dict)

    def prepare(self) -> None:
        """Install what is missing. A peer that cannot be prepared is noted and left out."""
        for peer in self.contest.peers:
            result = self.results[peer.name] = PeerResult(
                name=peer.name, title=peer.title, dtype=peer.dtype, against=peer.against
            )
            task = self.progress.add_task(f"{peer.name}: preparing", total=None)
            try:
                self._prepared[peer.name] = self._prepare(peer, task)
                result.versions = self._versions(peer)
            except (BenchError, RyzansteinError) as error:
                self._give_up(peer, f"not prepared: {error}")
            finally:
                self.progress.remove_task(task)

    def _prepare(self, peer: Peer, task: TaskID) -> Place:
        """Where its servers run, but for what differs from start to start."""
        work = self.contest.work

        def report(line: str) -> None:
            self.progress.update(task, description=f"{peer.name}: {line[:60]}")

        venv = catalog.ensure(peer.environment, work, report) if peer.environment else None
        weights = None
        if peer.weights:
            report("writing the GGUF file")
            weights = gguf_path(work / "gguf", self.contest.model, peer.weights)
            weights.parent.mkdir(parents=True, exist_ok=True)
            if not weights.exists():
                convert(self.contest.model, weights, "gguf", peer.weights, lambda *step: None)
        preload = catalog.preloads(venv) if peer.preloads and venv else ()
        if peer.preloads:
            loaded = ", ".join(path.name for path in preload) or "nothing: none was found"
            self.results[peer.name].remarks.append(f"Preloaded: {loaded}.")
        return Place(
            model=self.contest.model,
            weights=weights,
            venv=venv,
            state=work,
            port=0,
            threads=self.contest.threads,
            slots=1,
            kept=work / "kept",
            preload=preload,
        )

    def _versions(self, peer: Peer) -> dict[str, str]:
        found = catalog.versions(self._prepared[peer.name].python)
        named = {name: found[name] for name in ("python", *peer.packages) if name in found}
        if peer.environment and peer.environment.commit:
            named["commit"] = peer.environment.commit[:8]
        return named

    def run(self) -> None:
        """All rounds. A peer whose server fails is noted and left out from then on."""
        contest = self.contest
        steps = schedule(
            [peer for peer in contest.peers if peer.name in self._prepared], contest.workloads, contest.rounds
        )
        task = self.progress.add_task("all", total=len(steps))
        for step in steps:
            if step.peer.name in self._prepared:
                names = ", ".join(workload.name for workload in step.workloads)
                self.say(f"Round {step.round + 1} of {contest.rounds}, {step.peer.name}: {names}.")
                self._run_step(step)
            self.progress.advance(task)
        self.progress.remove_task(task)

    def _run_step(self, step: Step) -> None:
        state = self.contest.work / "state" / step.peer.name
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        log = self.contest.work / "logs" / f"{step.peer.name}-{step.slots}.log"
        log.parent.mkdir(exist_ok=True)
        place = replace(self._prepared[step.peer.name], slots=step.slots, state=state, port=free_port())
        result = self.results[step.peer.name]
        try:
            with Server(step.peer.launch(place), log, state) as server:
                model = self._wait(server, step.peer, place)
                result.ready_seconds.append(time.perf_counter() - server.started)
                for workload in step.workloads:
                    before = server.cpu_seconds()
                    summary = self._measure(step, workload, place, model)
                    spent = 1e3 * (server.cpu_seconds() - before) / max(1.0, summary.output_tokens)
                    result.cpu_ms.setdefault(workload.name, []).append(spent)
                    result.rounds.setdefault(workload.name, []).append(summary)
                    result.memory.append(server.memory())
                if (end := server.ended()) is not None:
                    raise BenchError(f"{end[0].upper()}{end[1:]}.")
        except BenchError as error:
            self._give_up(step.peer, f"round {step.round + 1}: {error} Its log is {log}.")

    def _wait(self, server: Server, peer: Peer, place: Place) -> str:
        async def wait() -> str:
            client = Client(_url(place), timeout=self.contest.ready_timeout)
            try:
                return await wait_ready(
                    server,
                    client,
                    model=str(place.model) if peer.named_by_path else None,
                    extra=peer.extra,
                    timeout=self.contest.ready_timeout,
                )
            finally:
                client.close()

        task = self.progress.add_task(f"{peer.name}: starting", total=None)
        try:
            return asyncio.run(wait())
        finally:
            self.progress.remove_task(task)

    def _measure(self, step: Step, workload: Workload, place: Place, model: str) -> Summary:
        contest = self.contest
        plan = Plan(
            _url(place),
            [workload],
            prompt_seed(contest.seed, step.round, workload.name),
            model=model,
            extra=dict(step.peer.extra),
            timeout=contest.request_timeout,
            vocabulary=contest.vocabulary,
            needs_done=step.peer.sends_done,
            keep_alive=step.peer.keeps_connections,
        )
        before = set(self.progress.task_ids)
        try:
            return run_to_end(plan, self.progress).rounds[0][0]
        finally:
            for task in set(self.progress.task_ids) - before:
                self.progress.remove_task(task)

    def _give_up(self, peer: Peer, reason: str) -> None:
        self._prepared.pop(peer.name, None)
        self.results[peer.name].left_out = reason
        self.say(f"{peer.name} is left out: {reason}")


def _url(place: Place) -> str:
    return f"http://127.0.0.1:{place.port}"
