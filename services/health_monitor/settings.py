"""Settings of a health monitor."""

from pydantic import Field

from shared.config import CommonSettings


class HealthMonitorSettings(CommonSettings):
    """What a health monitor needs to know beside the common settings."""

    hung_after: float = Field(default=2.5, gt=0)
    """Seconds without progress after which a rank with a step in flight counts as hung. Detected from heartbeats:
    within this time and two of them."""
    gone_after: float = Field(default=4.0, gt=0)
    """Seconds without a heartbeat after which an instance counts as gone. A killed one is known at once where the
    broker reports closed connections."""
    forget_after: float = Field(default=60.0, gt=0)
    """Seconds for which an instance or group that is gone is still listed."""
    load_interval: float = Field(default=1.0, ge=0)
    """Seconds, at least, between two records of a group's load; a change of state is written at once."""
