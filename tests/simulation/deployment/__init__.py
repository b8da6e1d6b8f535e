"""The real services as processes of a world: started, supervised, drained and replaced as an operator does it.

`install()` comes before the import of any service, and so before that of `deployment.deployment`.
"""

from tests.simulation.core import machine
from tests.simulation.deployment import versions


def install() -> None:
    """Puts the simulation's stand-ins in their places, for as long as this process lives. Idempotent."""
    machine.install()
    versions.install()
