"""What a gateway's settings say of fine-tuning jobs."""

from pydantic import Field

from shared.config import CommonSettings


class FineTuningSettings(CommonSettings):
    """The section that comes with fine-tuning jobs."""

    tenant_training_jobs: int = Field(default=16, gt=0)
    """Unfinished fine-tuning jobs of a tenant; beyond them submissions are refused."""
    tenant_training_bytes: int = Field(default=3 << 30, gt=0)
    """Bytes of a tenant's fine-tuned models, and of what its unfinished fine-tuning jobs may come to (examples, states,
    checkpoints); beyond them submissions are refused."""
    tenant_fine_tuned_models: int = Field(default=512, gt=0)
    """Fine-tuned models and checkpoints of a tenant, four of each unfinished job counted; beyond them submissions are
    refused."""
    training_examples: int = Field(default=200_000, gt=0)
    """Most examples of a fine-tuning file."""
    training_tokens: int = Field(default=1 << 24, gt=0)
    """Most tokens of a fine-tuning job's examples together; a gateway needs some 15 bytes for each while it checks
    them."""
