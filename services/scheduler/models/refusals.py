"""Why a model is not placed, in one sentence for whoever has asked for it. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from services.scheduler.models.cluster import ClusterView, Host, Replica
from services.scheduler.models.eviction import Worth
from services.scheduler.models.failures import Failures
from shared.errors import ModelDoesNotFit, NoGroupAvailable
from shared.pins import gigabytes

NAMED = 4  # groups that a sentence names at most


class ModelRefusal(NamedTuple):
    """`code`: one of `shared.errors` with which requests end at once; empty: they wait."""

    code: str
    reason: str


def why_not(model: str, cluster: ClusterView, failures: Failures, worth: Worth, now: float) -> ModelRefusal:
    """Why no host takes the model now."""
    refused = _why_not(model, cluster, failures, worth, now)
    if refused.code == ModelDoesNotFit.code and (lost := cluster.fits_lost(model)):
        return ModelRefusal("", f"The model {model} waits for the host {lost}, which is gone and may come back.")
    return refused


def _why_not(model: str, cluster: ClusterView, failures: Failures, worth: Worth, now: float) -> ModelRefusal:
    hosts = [host for host in cluster.hosts.values() if host.takes]
    if not hosts:
        return ModelRefusal("", f"There is no executor that loads models at run time; {model} waits for one.")
    blocked = failures.blocked(model, now)
    able = [host for host in hosts if host.name not in blocked]
    if not able:
        return _failed(model, failures, now)
    fitting = [host for host in able if cluster.size(model, host) <= host.memory]
    if not fitting:
        largest = max(able, key=lambda host: host.memory)
        return ModelRefusal(
            ModelDoesNotFit.code,
            f"The model {model} takes {gigabytes(cluster.size(model, largest))}, and no host has more than "
            f"{gigabytes(largest.memory)} for models; add a larger one, or set a smaller "
            "weight_dtype or kv_memory.",
        )
    if any(_may_fit(model, host, cluster, worth) for host in fitting):
        return ModelRefusal(
            "", f"The model {model} waits for memory: what could make room works, or was loaded only now."
        )
    return _kept(model, fitting, cluster, worth)


def _failed(model: str, failures: Failures, now: float) -> ModelRefusal:
    known = [failure for failure in failures.of(model) if failure.until > now]
    if not known:
        return ModelRefusal("", f"The model {model} waits for memory: its hosts have refused it lately.")
    last = max(known, key=lambda failure: failure.told_at)
    wait = max(1, round(min(failure.until for failure in known) - now))
    where = "one host" if len(known) == 1 else f"{len(known)} hosts"
    return ModelRefusal(
        NoGroupAvailable.code,
        f"The model {model} could not be loaded on {where} ({last.host}: {last.error.rstrip('.')}); it is tried again "
        f"in {wait:,} s, or when it is loaded by name.",
    )


def _may_fit(model: str, host: Host, cluster: ClusterView, worth: Worth) -> bool:
    """Whether waiting helps: it fits once everything that may go has gone."""
    going = sum(replica.memory for replica in host.replicas.values() if not _stays(replica, cluster, worth))
    return cluster.size(model, host) <= host.free + sum(host.promised.values()) + going


def _stays(replica: Replica, cluster: ClusterView, worth: Worth) -> bool:
    if replica.draining:
        return False
    others = cluster.replicas(replica.model).staying - 1
    return worth.keeps(replica) or others < worth.least(replica.model)


def _kept(model: str, hosts: Iterable[Host], cluster: ClusterView, worth: Worth) -> ModelRefusal:
    """Names what would have to go on the host where that is the least."""
    fewest: tuple[int, int, str, list[Replica]] | None = None
    for host in hosts:
        kept = [replica for replica in host.replicas.values() if _stays(replica, cluster, worth)]
        going = sum(replica.memory for replica in host.replicas.values()) - sum(item.memory for item in kept)
        lacking = cluster.size(model, host) - host.free - sum(host.promised.values()) - going
        named = _enough(kept, lacking)
        size = sum(replica.memory for replica in named)
        if fewest is None or (len(named), size) < fewest[:2]:
            fewest = len(named), size, host.name, named
    assert fewest is not None, "some host is large enough"
    _, _, where, named = fewest
    listed = ", ".join(f"{replica.model} ({gigabytes(replica.memory)})" for replica in named[:NAMED])
    more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
    takes = gigabytes(cluster.size(model, cluster.hosts[where]))
    return ModelRefusal(
        ModelDoesNotFit.code,
        f"The model {model} takes {takes}, and no host has as much beside what is pinned or kept: on {where} "
        f"{listed or 'something else'}{more} would have to go; unpin or unload it, or add a host.",
    )


def _enough(kept: list[Replica], lacking: int) -> list[Replica]:
    """The fewest groups that together free so many bytes."""
    named: list[Replica] = []
    for replica in sorted(kept, key=lambda item: -item.memory):
        if lacking <= 0:
            break
        named.append(replica)
        lacking -= replica.memory
    return named
