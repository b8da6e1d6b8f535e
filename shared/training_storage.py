"""Bytes that a fine-tuning job keeps in NATS. A gateway reserves them of the tenant's quota before the job is queued,
and its host stores nothing beyond. Pure.

    examples    until the job is over
    states      two of them: the newest, and the one that it replaces
    adapters    of the last epochs' ends, one that makes way for a newer one, and the result
    metrics     a row for each step
"""

from collections.abc import Mapping

from shared.messages.training import Hyperparameters, TrainingJob

KEPT_ADAPTERS = 3  # adapters of ends of epochs that a job keeps: the last ones
NAMES = KEPT_ADAPTERS + 1  # models that a job makes at most, its result among them
VALUE_BYTES = 4  # of one number of a factor, or of a moment: float32
STATE_VALUES = 3  # numbers of a state for each of the factors': itself, two moments
STEP_BYTES = 256  # of what a state, and the table, have of one step
FILE_BYTES = 1 << 20  # of a file beside its numbers: names and shapes of its tensors


def factor_values(widths: Mapping[str, int], hyperparameters: Hyperparameters) -> int:
    """Numbers of an adapter's factors. `widths`: `ModelCard.adapter_widths`; a target that it does not name may be as
    wide as all of them together."""
    whole = sum(widths.values())
    chosen = sum(widths.get(target, whole) for target in hyperparameters.targets)
    return hyperparameters.rank * (min(whole, chosen) if hyperparameters.targets else whole)


def reserved_bytes(
    widths: Mapping[str, int], hyperparameters: Hyperparameters, steps: int = 0, examples: int = 0
) -> int:
    """What a job may come to. `steps`: in all, 0 while they are not known; `examples`: bytes of them."""
    factors = VALUE_BYTES * factor_values(widths, hyperparameters)
    metrics = steps * STEP_BYTES
    state = STATE_VALUES * factors + metrics + FILE_BYTES
    adapters = min(hyperparameters.epochs or NAMES, KEPT_ADAPTERS + 1) + 1
    return examples + 2 * state + adapters * (factors + FILE_BYTES) + metrics + FILE_BYTES


def kept_bytes(job: TrainingJob) -> int:
    """What its record names."""
    made = [*job.adapters, *([job.result] if job.result is not None else [])]
    return (
        (job.data.bytes if job.data is not None else 0)
        + (job.state.bytes if job.state is not None else 0)
        + sum(adapter.bytes for adapter in made)
    )
