"""What a gateway's settings say of batches."""

from pydantic import Field

from shared.config import CommonSettings


class BatchJobSettings(CommonSettings):
    """The section that comes with batches."""

    batch_requests: int = Field(default=200_000, gt=0)
    """Most lines of a batch."""
    batch_window_limit: float = Field(default=604_800.0, gt=0)
    """Longest completion window of a batch, in seconds."""
    tenant_batches: int = Field(default=200, gt=0)
    """Unfinished batches of a tenant; beyond them submissions are refused."""
    batch_jobs: int = Field(default=8, ge=0)
    """Batches that this gateway runs at a time; 0: it leaves them to other gateways."""
    batch_parallelism: int = Field(default=256, gt=0)
    """Most batch lines in flight from this gateway; it never has more than the groups have places for."""
