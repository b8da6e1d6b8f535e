"""Decides which host trains which fine-tuning job. Pure: records come in, changes of jobs and commands for hosts go
out.

    queued, no host ──▶ host, attempt + 1 ──▶ told until it shows the job in its heartbeats
                ▲                                   │ it is gone, does not show it, or gives it back
                └───────────────────────────────────┘

A job of several replicas has as many hosts, all at once or none; where one is lost, the job is given anew as a whole.

Jobs: of the tenant that has the fewest under way, its oldest. Hosts: those that serve the base first, then those that
have its files; idle ones before busy ones; then those with the most memory left. Only a host knows what a job takes:
one that has not as much says so, and is asked again when it has. Models come first: a host that loads one ends
trainings for it, which give their jobs back.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from services.scheduler.models.cluster import ClusterView, Host
from shared.messages import HostCommand
from shared.messages.registry import StartTraining, StopTraining
from shared.messages.training import TrainingJob
from shared.nats.tenants import tenant_key

# Seconds that a host may be unknown before its jobs go to others: its record may have been read late.
GONE_AFTER = 2.0
SILENT_AFTER = 20.0  # seconds in which a host that is there must have shown a job that it was given
REPEAT = 3.0  # seconds after which a host is told again
# Seconds for which a host that has refused a job is not asked again, unless it has got the memory.
REFUSED_FOR = 30.0
AT_ONCE = 256  # jobs for which one pass looks for a host, at most

_replace = msgspec.structs.replace


class TrainingDecisions(NamedTuple):
    changes: dict[str, TrainingJob]  # what jobs are to be, by their keys
    commands: list[tuple[str, HostCommand]]  # hosts, and what they are to be told
    waiting: int  # jobs that have no host
    running: int


class _Refusal(NamedTuple):
    until: float
    memory: int  # that the job takes; 0: that is not why
    error: str


class _Trial(NamedTuple):
    """A job that a host was given, and does not show."""

    attempt: int
    since: float
    told_at: float


class TrainingPlacer:
    """One scheduler's; all keep `cluster` up to date, and the one that decides asks for decisions."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._trials: dict[tuple[str, str], _Trial] = {}  # by job and host
        # When each host was told to end which attempt of which job.
        self._stopped: dict[tuple[str, str, int], float] = {}
        self._refused: dict[tuple[str, str], _Refusal] = {}  # by job and host
        self._jobs: Mapping[str, TrainingJob] = {}
        self._now = 0.0
        self._changes: dict[str, TrainingJob] = {}
        self._commands: list[tuple[str, HostCommand]] = []

    def decide(self, jobs: Mapping[str, TrainingJob], now: float) -> TrainingDecisions:
        """`jobs`: those that are not over, by their keys; `now` in unix seconds."""
        self._jobs, self._now = jobs, now
        self._changes, self._commands = {}, []
        self._forget()
        lost = [key for key, job in jobs.items() if job.host and is_live(job) and self._is_lost(key, job)]
        for key in lost:
            if jobs[key].wanted != "run":  # a gateway writes what comes of it
                self._changes[key] = _replace(jobs[key], host="", waiting_for="")
        waiting = {key: job for key, job in jobs.items() if (is_live(job) and not job.host) or key in lost}
        waiting = {key: job for key, job in waiting.items() if job.wanted == "run"}
        self._stop_others()
        placed = self._place_all(waiting)
        running = sum(1 for job in jobs.values() if job.host and is_live(job)) - len(lost) + placed
        return TrainingDecisions(self._changes, self._commands, len(waiting) - placed, running)

    def refused(self, key: str, host: str, memory: int, error: str) -> None:
        """The host does not take the job. `memory`: bytes that it takes, where the host has not as many."""
        job = self._jobs.get(key)
        if job is not None and host in job.hosts:
            self._refused[key, host] = _Refusal(self._now + REFUSED_FOR, memory, error)
            self._trials[key, host] = _Trial(job.attempt, self._now - SILENT_AFTER, self._now)

    # --- jobs that have a host -------------------------------------------------------------------

    def _is_lost(self, key: str, job: TrainingJob) -> bool:
        """Whether one of its hosts does not train it, and will not."""
        lost = [name for name in job.hosts if self._is_lost_on(name, key, job)]  # all of them are told
        return bool(lost)

    def _is_lost_on(self, name: str, key: str, job: TrainingJob) -> bool:
        """Tells the host of it where it does not show it yet."""
        host = self._cluster.hosts.get(name)
        if host is not None and _shows(host, job):
            self._trials.pop((key, name), None)
            return False
        trial = self._trials.get((key, name))
        if trial is None or trial.attempt != job.attempt:
            trial = self._trials[key, name] = _Trial(job.attempt, self._now, 0.0)
        if host is None:
            return self._now - trial.since >= GONE_AFTER
        if self._now - trial.since >= SILENT_AFTER:
            return True
        if self._now - trial.told_at >= REPEAT:
            self._trials[key, name] = trial._replace(told_at=self._now)
            self._commands.append((name, StartTraining(job.id, job.tenant, job.attempt)))
        return False

    def _stop_others(self) -> None:
        """Hosts that train what is another's by now, or nobody's, are told to look at the record."""
        for host in self._cluster.hosts.values():
            for training in host.said.trainings:
                key = tenant_key(training.tenant, training.job)
                job = self._jobs.get(key)
                mine = job is not None and host.name in job.hosts and job.attempt <= training.attempt
                told = (host.name, key, training.attempt)
                if mine or training.state == "ending" or self._now - self._stopped.get(told, 0.0) < REPEAT:
                    continue
                self._stopped[told] = self._now
                self._commands.append((host.name, StopTraining(training.job, training.tenant, training.attempt)))

    def _forget(self) -> None:
        for key, host in list(self._trials):
            if key not in self._jobs or host not in self._jobs[key].hosts:
                del self._trials[key, host]
        for refused in [one for one in self._refused if one[0] not in self._jobs]:
            del self._refused[refused]
        for told in [told for told, at in self._stopped.items() if self._now - at >= REPEAT]:
            del self._stopped[told]

    # --- jobs that wait --------------------------------------------------------------------------

    def _place_all(self, waiting: dict[str, TrainingJob]) -> int:
        """Gives jobs to hosts; returns to how many. Next comes the tenant with the fewest under way; of equals, the one
        with the oldest job."""
        places = self._places()
        running = Counter(job.tenant for job in self._jobs.values() if job.host and is_live(job))
        queues: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
        for key, job in sorted(waiting.items(), key=lambda item: (item[1].created_at, item[0]), reverse=True):
            queues[job.tenant].append((job.created_at, key))
        turns = [(running[tenant], queue[-1], tenant) for tenant, queue in queues.items()]
        heapq.heapify(turns)
        placed = looked = 0
        while turns:
            _, (_, key), tenant = heapq.heappop(turns)
            looked += self._now >= waiting[key].retry_at
            has_hosts = self._place(key, waiting[key], places, looks=looked <= AT_ONCE)
            placed += has_hosts
            running[tenant] += has_hosts
            queues[tenant].pop()
            if queue := queues[tenant]:
                heapq.heappush(turns, (running[tenant], queue[-1], tenant))
        return placed

    def _place(self, key: str, job: TrainingJob, places: dict[str, int], *, looks: bool) -> bool:
        """Gives the job to hosts, if some can be had, else notes why it waits."""
        if self._now < job.retry_at:
            if job.host:
                self._changes[key] = _replace(job, host="")
            return False
        hosts, reason = self._hosts_for(key, job, places) if looks else ([], "Others come first.")
        if hosts:
            for name in hosts:
                places[name] -= 1
            self._changes[key] = _given(job, hosts)
        elif job.host or job.waiting_for != reason:
            self._changes[key] = _replace(job, host="", waiting_for=reason)
        return bool(hosts)

    def _places(self) -> dict[str, int]:
        """Free places by host."""
        taken: Counter[str] = Counter(
            name
            for job in self._jobs.values()
            if is_live(job)
            for name in job.hosts
            if (host := self._cluster.hosts.get(name)) is not None and not _shows(host, job)
        )
        return {
            name: host.said.trains - len(host.said.trainings) - taken[name]
            for name, host in self._cluster.hosts.items()
            if host.is_ready and host.said.trains
        }

    def _hosts_for(self, key: str, job: TrainingJob, places: Mapping[str, int]) -> tuple[list[str], str]:
        """The best hosts, one for each of its replicas, or why there are none."""
        wanted = job.hyperparameters.replicas
        if not places:
            return [], "No executor takes fine-tuning jobs; start one with RYZANSTEIN_TRAINS above 0."
        able = [self._cluster.hosts[name] for name in places if self._has_base(self._cluster.hosts[name], job)]
        if not able:
            return [], (
                f"No executor that takes fine-tuning jobs serves its base {job.model}, whose files are with that "
                "executor alone."
            )
        if len(able) < wanted:
            return [], (
                f"It is trained by {wanted} executors side by side, and {len(able)} can take it; start more with "
                "RYZANSTEIN_TRAINS above 0."
            )
        free = [host for host in able if places[host.name] > 0]
        if len(free) < wanted:
            if wanted > 1:
                return ([], f"It begins when {wanted} executors have a free place at a time; {len(free)} have one.")
            return [], "All places for fine-tuning jobs are taken; it begins when one is free."
        taking = [host for host in free if not self._refuses(key, host)]
        if len(taking) < wanted:
            refusals = (self._refused[key, host.name] for host in free if host not in taking)
            said = max(refusals, key=lambda refusal: refusal.until)
            who = f"Of {len(free)} executors with a free place {len(taking)} take" if taking else NOBODY
            return [], f"{who} it: {said.error}"[:MAX_REASON]
        best = heapq.nsmallest(wanted, taking, key=lambda host: self._rank(host, job))
        return [host.name for host in best], ""

    def _has_base(self, host: Host, job: TrainingJob) -> bool:
        """Whether it has the base's files, or can have them."""
        if job.base is None or job.base.source:
            return True
        return any(replica.model == job.model and not replica.ours for replica in host.replicas.values())

    def _refuses(self, key: str, host: Host) -> bool:
        refusal = self._refused.get((key, host.name))
        if refusal is None:
            return False
        has_room = refusal.memory and host.room_for_jobs >= refusal.memory
        return not has_room and self._now < refusal.until

    def _rank(self, host: Host, job: TrainingJob) -> tuple[bool, bool, bool, int, float, int]:
        """The smaller the better."""
        serves = any(replica.model == job.model for replica in host.replicas.values())
        stored = self._cluster.reported(job.model, host) is not None
        room = host.room_for_jobs / max(1, host.memory)
        return not serves, not stored, host.is_busy, len(host.said.trainings), -room, host.number


NOBODY = "No executor with a free place takes"
MAX_REASON = 500  # characters of why a job waits


def is_live(job: TrainingJob) -> bool:
    """Whether a host is to train it, or to say what becomes of it. What has its result waits for a gateway."""
    return job.status in ("queued", "running") and job.result is None


def _given(job: TrainingJob, hosts: list[str]) -> TrainingJob:
    """To these hosts, in a new attempt, in which its replicas meet anew."""
    return _replace(
        job, host=hosts[0], helpers=hosts[1:], attempt=job.attempt + 1, waiting_for="", retry_at=0.0, meeting=""
    )


def _shows(host: Host, job: TrainingJob) -> bool:
    mine = (job.id, job.tenant, job.attempt)
    return any((training.job, training.tenant, training.attempt) == mine for training in host.said.trainings)
