"""Settings of a scheduler."""

from pydantic import Field

from shared.config import CommonSettings


class SchedulerSettings(CommonSettings):
    """What a scheduler needs to know beside the common settings."""

    ack_wait: float = Field(default=2.0, ge=0.5)
    """Seconds of silence after which a dead scheduler's requests go to another one; no pull of it lasts longer."""
    max_waiting: int = Field(default=4096, gt=0)
    """Interactive requests for one model that a scheduler lets wait; more are refused with queue_full."""
    held_requests: int = Field(default=1024, gt=0)
    """Recovery and batch requests that one scheduler holds, each; the rest waits in the stream."""
    held_bytes: int = Field(default=256 << 20, gt=0)
    """Bytes of all requests that one scheduler holds; the rest waits in the stream."""
    batch_wait: float = Field(default=0.005, ge=0, le=0.1)
    """Seconds that a dispatch batch waits, at most, for more requests to the same busy group."""
    dispatch_timeout: float = Field(default=2.0, gt=0)
    """Seconds that a group leader has to answer a dispatch batch."""
    suspect_time: float = Field(default=1.0, gt=0)
    """Seconds that a group gets nothing after its leader has not answered; doubled each time, up to 8 times."""
    sticky_tokens: int = Field(default=4096, ge=0)
    """Prompt tokens' time by which a session's group may answer later than the best one before the session
    moves there; the tokens of its own prompt come on top."""
    session_cache: int = Field(default=65_536, gt=0)
    """Session pins that one scheduler remembers."""
