"""Settings of a health monitor."""

from pydantic import Field

from shared.config import CommonSettings


class HealthMonitorSettings(CommonSettings):
    """What a health monitor needs to know beside the common settings."""

    hung_after: float = Field(default=2.5, gt=0)
    """Seconds without progress after which a rank with a step in flight is hung. Heartbeats show it: a
    rank that stops is known within this and two beats."""
    gone_after: float = Field(default=4.0, gt=0)
    """Seconds without a heartbeat after which an instance is gone. One that is killed is known at once where
    the broker tells of closed connections."""
    forget_after: float = Field(default=60.0, gt=0)
    """Seconds for which something that is gone is still listed."""
    load_interval: float = Field(default=1.0, ge=0)
    """Seconds between two records of a group's load, at least; a change of state is written at once."""
