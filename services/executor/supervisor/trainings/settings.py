"""What an executor's settings say of fine-tuning jobs."""

from pydantic import Field

from shared.config import CommonSettings


class TrainingSettings(CommonSettings):
    """The section of a host's settings that comes with fine-tuning jobs."""

    trains: int = Field(default=1, ge=0, le=16)
    """Fine-tuning jobs that the executor trains at a time, in the time that interactive requests leave; 0: none. One
    that is a host of several (`nnodes`) trains none."""
    training_state_interval: float = Field(default=60.0, ge=0)
    """Seconds of training that a fine-tuning job loses at most when its executor dies: between two states that its
    trainer writes, unless one takes so long that they would cost more than 2%. 0: a state after every step."""
