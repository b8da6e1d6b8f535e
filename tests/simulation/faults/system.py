"""What faults need of that which they happen to."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tests.simulation.core.processes import Process
from tests.simulation.core.world import World

# What an instance may be. Its name is its role and a number from 1: `gateway-1`.
ROLES = ("gateway", "scheduler", "health-monitor", "executor", "broker")
# Kinds of clients of the deployment (`tests/simulation/clients`), as a test holds them against.
CLIENTS = (
    "stream",
    "completion",
    "hasty",
    "slow",
    "leaving",
    "cancelling",
    "response",
    "whole",
    "keyed",
    "conversation",
    "stored",
    "limited",
    "probing",
    "websocket",
    "grpc",
    "batches",
    "training",
    "models",
    "flooding",
    "poison",
    "filling",
)
PLANS = ("pause", "tokens", "prompt", "size", "wait")  # what is drawn of each between two numbers


class System(Protocol):
    """Something that runs in a world: the deployment with its clients, or a toy of a test."""

    world: World

    def instances(self) -> Mapping[str, Sequence[str]]:
        """Roles, and the names of the instances that there are by the scenario, alive or not."""

    def process(self, name: str) -> Process | None:
        """The instance's newest process, `executor-1/rank-0` a ring's; None: it has none now."""

    async def recovered(self, name: str) -> None:
        """Returns once the instance works again, of whatever has happened to it; empty: all."""

    async def operate(self, verb: str, target: str, parameters: Mapping[str, object]) -> None:
        """What an operator, a client of the registry or the broker's disk does: the verbs of `kinds.py`. Raises
        `NotImplementedError` where the system knows no such verb."""
