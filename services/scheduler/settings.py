"""Settings of a scheduler."""

from pydantic import Field

from shared.config import CommonSettings


class SchedulerSettings(CommonSettings):
    """What a scheduler needs to know beside the common settings."""

    ack_wait: float = Field(default=2.0, ge=0.5)
    """Seconds after which the unacknowledged requests of a dead scheduler are redelivered to another one; no pull
    lasts longer."""
    max_waiting: int = Field(default=4096, gt=0)
    """Interactive requests for one model that a scheduler queues; more are refused with `queue_full`."""
    held_requests: int = Field(default=1024, gt=0)
    """Most recovery requests, and as many batch requests, that a scheduler holds; the rest wait in the stream."""
    held_bytes: int = Field(default=256 << 20, gt=0)
    """Bytes of all requests that a scheduler holds; the rest wait in the stream."""
    batch_wait: float = Field(default=0.005, ge=0, le=0.1)
    """Seconds that a dispatch batch waits, at most, for more requests to the same busy group."""
    dispatch_timeout: float = Field(default=2.0, gt=0)
    """Seconds that a group leader has to answer a dispatch batch."""
    suspect_time: float = Field(default=1.0, gt=0)
    """Seconds for which a group gets no requests after its leader has not answered; doubled each time, up to 8
    times."""
    sticky_tokens: int = Field(default=4096, ge=0)
    """Session affinity, in prompt tokens: a session moves to another group only if its own would answer later by
    more than the time that so many tokens, and those of the request's prompt, take."""
    session_cache: int = Field(default=65_536, gt=0)
    """Session pins that a scheduler caches."""
    model_lease: float = Field(default=4.0, ge=0.4, le=60.0)
    """Seconds after which another scheduler decides which host loads which model, when the one that did has died."""
