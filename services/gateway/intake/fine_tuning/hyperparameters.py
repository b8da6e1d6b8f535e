"""What `auto` comes to, once it is known how many examples there are. Pure.

epochs                     3; more for fewer than 34 examples, so that about a hundred are seen; fewer beyond 8,333,
                           so that no more than 25,000 are (OpenAI's own rule, from its cookbook)
batch_size                 0.2% of the examples, from 1 to 32; one for each replica at least
learning_rate_multiplier   1
beta                       0.1 (of DPO)
alpha                      twice the rank
"""

import msgspec

from shared.messages.training import Hyperparameters, TrainingMethod

_EPOCHS = 3
_MOST_EPOCHS = 25
_LEAST_SEEN, _MOST_SEEN = 100, 25_000
"""Examples in all epochs together."""
_SHARE = 0.002
_MOST_BATCH = 32
_BETA = 0.1


def chosen(given: Hyperparameters, method: TrainingMethod, examples: int) -> Hyperparameters:
    """`given` without anything that is `auto`. `examples`: of DPO pairs; at least one."""
    return msgspec.structs.replace(
        given,
        epochs=given.epochs or epochs_for(examples),
        batch_size=given.batch_size or batch_size_for(examples, given.replicas),
        learning_rate_multiplier=given.learning_rate_multiplier or 1.0,
        beta=given.beta or (_BETA if method == "dpo" else 0.0),
        alpha=given.alpha or 2.0 * given.rank,
    )


def epochs_for(examples: int) -> int:
    """From 1 to 25."""
    if examples * _EPOCHS < _LEAST_SEEN:
        return min(_MOST_EPOCHS, _LEAST_SEEN // examples)
    if examples * _EPOCHS > _MOST_SEEN:
        return max(1, _MOST_SEEN // examples)
    return _EPOCHS


def batch_size_for(examples: int, replicas: int = 1) -> int:
    """From 1 to 32, and no more than there are examples."""
    share = min(_MOST_BATCH, max(1, round(examples * _SHARE)))
    return max(1, min(examples, max(share, replicas)))
