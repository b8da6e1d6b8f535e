"""What a trainer takes of a host's memory, in bytes, before it is started. Pure.

base            nothing where it is mapped and served here too; else its weights
activations     of the tokens of a micro batch: the inputs of all layers (the rest is computed again, layer by
                layer), all that one layer computes with, and what else is kept so as to compute less again
factors         weights, gradients and both moments, in fp32
the process     PyTorch and its buffers
"""

from collections.abc import Mapping
from typing import Any

from services.executor.ipc.trainer_pipe import KEPT_ACTIVATIONS
from shared.messages.training import Hyperparameters

PROCESS = 512 << 20  # PyTorch, its threads, and buffers of one weight
MICRO_BATCH = 2048  # tokens that are computed at a time, unless an example is longer
FACTOR_BYTES = 16  # of one number of the factors: itself, its gradient, two moments
# Values as wide as the hidden state that a layer keeps for a token while it is computed forward and backward, beside
# those as wide as its feed-forward part, of which there are `FEED_FORWARD_VALUES`.
LAYER_VALUES = 24
FEED_FORWARD_VALUES = 6
UNKNOWN = 4096  # width that is reckoned with where the configuration does not tell


def training_bytes(
    config: Mapping[str, Any],
    hyperparameters: Hyperparameters,
    longest: int,
    base: int,
    process: int = PROCESS,
    ranks: int = 1,
) -> int:
    """`config`: the base's; `longest`: tokens of the longest example; `base`: bytes of weights that it holds alone;
    `ranks`: processes that share them, each with all factors."""
    text = config.get("text_config")
    facts: Mapping[str, Any] = {**config, **text} if isinstance(text, dict) else config
    hidden = _number(facts, "hidden_size", "n_embd") or UNKNOWN
    layers = _number(facts, "num_hidden_layers", "n_layer") or 32
    inner = _number(facts, "intermediate_size", "n_inner") or 4 * hidden
    tokens = max(MICRO_BATCH, longest)
    of_layer = 4 * tokens * (LAYER_VALUES * hidden + FEED_FORWARD_VALUES * inner)
    activations = 4 * tokens * layers * hidden + of_layer + min(KEPT_ACTIVATIONS, layers * of_layer)
    wide = 4 * 2 * hidden + 3 * (hidden + inner)
    factors = hyperparameters.rank * wide * layers * FACTOR_BYTES
    return base + ranks * (activations + factors + process)


def _number(facts: Mapping[str, Any], *names: str) -> int:
    return next((value for name in names if isinstance(value := facts.get(name), int)), 0)
