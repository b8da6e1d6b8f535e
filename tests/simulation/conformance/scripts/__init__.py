"""The scripts that were written by hand: every operation that `services/` and `shared/` use, and what goes wrong."""

from tests.simulation.conformance.operations import Script
from tests.simulation.conformance.scripts import buckets, consumers, faults, messages, services, streams

CORPUS: tuple[Script, ...] = (
    *messages.SCRIPTS,
    *streams.SCRIPTS,
    *consumers.SCRIPTS,
    *buckets.SCRIPTS,
    *services.SCRIPTS,
    *faults.SCRIPTS,
)
