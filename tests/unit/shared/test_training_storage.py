"""What a fine-tuning job keeps, reckoned before it is queued."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.messages.training import (
    Hyperparameters,
    TokenizedData,
    TrainedAdapter,
    TrainingJob,
    TrainingMetrics,
    TrainingState,
)
from shared.training_storage import KEPT_ADAPTERS, factor_values, kept_bytes, reserved_bytes

WIDTHS = {"q_proj": 1000, "v_proj": 500, "down_proj": 2000}
JOB = TrainingJob("job", "t", 1.0, "m", "supervised", "f", "f", 1)


def test_of_targets_their_widths_count_and_of_an_unknown_one_all() -> None:
    assert factor_values(WIDTHS, Hyperparameters(rank=8)) == 8 * 3500
    assert factor_values(WIDTHS, Hyperparameters(rank=8, targets=["q_proj", "v_proj"])) == 8 * 1500
    assert factor_values(WIDTHS, Hyperparameters(rank=8, targets=["q_proj", "qkv"])) == 8 * 3500


@given(
    rank=st.integers(1, 256), epochs=st.integers(1, 50), steps=st.integers(1, 100_000), examples=st.integers(0, 1 << 30)
)
def test_a_job_that_is_as_wide_as_was_reckoned_never_goes_beyond(
    rank: int, epochs: int, steps: int, examples: int
) -> None:
    """At its fullest: a state replaces another beside all adapters, or the result is written beside them."""
    chosen = Hyperparameters(epochs=epochs, rank=rank)
    adapter = 4 * factor_values(WIDTHS, chosen)
    state = 3 * adapter + 200 * steps
    metrics = TrainingMetrics(1)
    made = [TrainedAdapter(step, "d", rank, adapter, 1, metrics) for step in range(min(epochs - 1, KEPT_ADAPTERS))]
    data = TokenizedData("o", 1, 1, 1, 1, bytes=examples)
    job = msgspec.structs.replace(JOB, data=data, state=TrainingState(1, "s", state, "d"), adapters=made)
    reserved = reserved_bytes(WIDTHS, chosen, steps, examples)
    assert kept_bytes(job) + max(state, adapter) <= reserved


def test_fifty_epochs_keep_no_more_than_a_few() -> None:
    few, many = (reserved_bytes(WIDTHS, Hyperparameters(epochs=epochs, rank=64)) for epochs in (4, 50))
    assert few == many
