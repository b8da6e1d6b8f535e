"""Whether all pinned models can be in memory at the same time, as far as it is known. Pure.

A pin is a promise: what is pinned never makes way. So one that the hosts cannot keep is refused where it is written,
and not only when a request comes. What is compared is the sum of what pinned models take and of what hosts have, and
each model with the largest host; that all fit by that, and no way to spread them does, is found by the placement.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shared.messages import GroupRecord, HostRecord, ModelSpec

NAMED = 8  # models that a sentence names at most


class Pins(NamedTuple):
    """Sentences; empty: there is nothing to say."""

    refused: str = ""  # why they do not fit, and what would have to go
    warning: str = ""  # why it is not known whether they do


def promises_more(spec: ModelSpec, known: ModelSpec | None) -> bool:
    """Whether an entry that is written over `known` pins what was not pinned before."""
    if not spec.pinned:
        return False
    return known is None or not known.pinned or spec.least > known.least or _is_other(spec, known)


def pins_of(
    specs: Mapping[str, ModelSpec],
    before: Mapping[str, ModelSpec],
    groups: Iterable[GroupRecord],
    hosts: Iterable[HostRecord],
) -> Pins:
    """Of the registry `specs`, which was `before`: of a model that gets other files or settings no size is known."""
    pinned = {name: spec for name, spec in specs.items() if spec.pinned}
    if not pinned:
        return Pins()
    there = [host for host in hosts if host.state != "gone"]
    memory = [host.host.memory for host in there if host.host.takes_models and host.host.memory]
    if not memory:
        return Pins(warning="No host loads models now, so it is unknown whether all pinned models fit.")
    sizes = _sizes(groups, there)
    for name, spec in pinned.items():
        if name in before and _is_other(spec, before[name]):
            sizes.pop(name, None)
    for name in sorted(pinned):
        if (size := sizes.get(name, 0)) > max(memory):
            return Pins(
                f"The model {name} is pinned and takes {gigabytes(size)}, and no host has more than "
                f"{gigabytes(max(memory))} for models; unpin it, or add a larger host."
            )
    taken = {name: sizes[name] * max(1, spec.least) for name, spec in pinned.items() if name in sizes}
    if (lacking := sum(taken.values()) - sum(memory)) > 0:
        return Pins(
            f"What is pinned takes {gigabytes(sum(taken.values()))} ({_listed(taken, sorted(taken))}), and all hosts "
            f"have {gigabytes(sum(memory))} together: {_listed(taken, _enough(taken, lacking))} would have to go; "
            "unpin it, or add a host."
        )
    if unknown := sorted(pinned.keys() - taken.keys()):
        more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
        return Pins(
            warning=f"It is not known yet how much memory {', '.join(unknown[:NAMED])}{more} will take, nor whether "
            "all pinned models fit."
        )
    return Pins()


def _is_other(spec: ModelSpec, known: ModelSpec) -> bool:
    return (spec.source, spec.revision, spec.settings) != (known.source, known.revision, known.settings)


def _sizes(groups: Iterable[GroupRecord], hosts: Iterable[HostRecord]) -> dict[str, int]:
    """The most that a group of each model is known to take."""
    told = [(item.model, item.memory) for host in hosts for item in host.host.models]
    told += [(group.model, group.memory) for group in groups]
    found: dict[str, int] = {}
    for model, size in told:
        if size > found.get(model, 0):
            found[model] = size
    return found


def _enough(taken: Mapping[str, int], lacking: int) -> list[str]:
    """The fewest models that together free so many bytes."""
    named: list[str] = []
    for name in sorted(taken, key=lambda one: (-taken[one], one)):
        if lacking <= 0:
            break
        named.append(name)
        lacking -= taken[name]
    return named


def _listed(taken: Mapping[str, int], names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(f"{name} {gigabytes(taken[name])}" for name in names[:NAMED]) + more


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
